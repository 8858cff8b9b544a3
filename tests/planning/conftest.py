import pytest

from megabatch.models import create


@pytest.fixture(scope="session")
def glyph():
    """The smallest model that the library has."""
    return create("glyph-small")
