"""One module a subcommand; each exposes `command`."""
