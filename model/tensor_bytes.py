"""How much memory the tensors of an object take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def tensor_bytes(thing: Any) -> int:
    """Of all tensors that can be reached from it through attributes and containers; views of one
    storage count once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo = [thing]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, str | bytes | int | float | type):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.is_mkldnn:  # its storage cannot be asked
                storages[-id(item)] = item.nbytes
            else:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            continue
        if isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, list | tuple | set):
            todo.extend(item)
        todo.extend(getattr(item, "__dict__", {}).values())
        todo.extend(getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return sum(storages.values())
