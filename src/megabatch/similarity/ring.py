"""Between devices: the group of processes that share one similarity matrix.

Until shards travel a ring of processes, a group of more than one is refused.
"""

from __future__ import annotations

import torch.distributed as dist

LOCAL = "local"


def check_group(group: object) -> None:
    """Accept this process alone: `group="local"`, or None where there is but one process.

    Raises:
        TypeError: `group` is neither None, "local" nor a process group.
        NotImplementedError: the group holds more than this process.
    """
    if group == LOCAL:
        return
    if not (group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup))):
        raise TypeError(f"group: expected None, 'local' or a process group, got {group!r}")
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size(group)
        if size > 1:
            raise NotImplementedError(
                f"group: expected one process, got a group of {size}; similarity over several "
                "processes is not there yet (group='local' keeps each rank to its own rows)"
            )
