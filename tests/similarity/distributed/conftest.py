from tests.similarity.distributed.processes import outcomes

__all__ = ["outcomes"]
