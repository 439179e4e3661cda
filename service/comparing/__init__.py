"""What two bundles, or a bundle and another service, answer to one query log, compared in bounded memory."""
