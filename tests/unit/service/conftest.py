"""The tiny bundle of the service's other tests."""

from tests.integration.service.conftest import tiny_bundle  # noqa: F401
