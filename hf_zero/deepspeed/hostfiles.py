"""``deepspeed.launcher.runner``: hostfiles and filters of hosts under DeepSpeed's names, read by
``hf_zero.launch.hosts``; lists of cores.
"""

from __future__ import annotations

import base64
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError, LaunchError
from hf_zero.launch.hosts import Host, read_hostfile, select
from hf_zero.logging import logger


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise LaunchError as ConfigError: scripts of DeepSpeed catch ValueError."""
    try:
        yield
    except LaunchError as error:
        raise ConfigError(str(error)) from None


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> OrderedDict[str, int] | None:
    """Return the slots of each host, in the order of the file; None, with a warning, if there is no
    such file. Raises ConfigError, naming the line, for an invalid hostfile.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("there is no hostfile %s; this machine alone takes part", path)
        return None
    with _as_value_error():
        return OrderedDict((host.name, len(host.slots)) for host in read_hostfile(path))


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """Return the part of ``host_info`` (slots of each host) that one of the filters leaves, such as
    ``worker-0@worker-1:0,2``, in the order of ``host_info``.

    Raises ConfigError for both filters at once, and for unknown hosts and slots.
    """
    if not include_str and not exclude_str:
        return host_info
    hosts = [Host(name, tuple(slots)) for name, slots in host_info.items()]
    with _as_value_error():
        chosen = select(hosts, include_str, exclude_str, may_be_empty=True)
    return OrderedDict((host.name, list(host.slots)) for host in chosen)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """Run :func:`parse_resource_filter` on the number of slots of each host."""
    slots = OrderedDict((name, list(range(count))) for name, count in resource_pool.items())
    return parse_resource_filter(slots, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Return ``world_info`` as JSON in URL-safe base64, as launchers pass it on."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def parse_range_list(range_str: str) -> list[int]:
    """Return the numbers of ``0,2-4,6``: both ends belong to a range. Raises ConfigError for an
    invalid list, or one that does not ascend.
    """
    numbers: list[int] = []
    for part in range_str.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{part!r} in {range_str!r} is no range; write 3, or 2-4")
        found = range(int(first), int(last or first) + 1)
        if not found or (numbers and found[0] <= numbers[-1]):
            raise ConfigError(f"{range_str!r} does not ascend at {part!r}; sort its ranges")
        numbers += found
    return numbers
