from tests.similarity.conftest import small_blocks  # noqa: F401  # a fixture
