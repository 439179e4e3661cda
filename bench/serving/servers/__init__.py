"""The services that are measured beside ours, each an ASGI application for uvicorn."""
