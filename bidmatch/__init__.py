"""bidmatch: search queries to advertisers' bid phrases. The front door: command line and HTTP client."""

__version__ = "0.1.0"
