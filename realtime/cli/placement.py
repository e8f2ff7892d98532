"""Which engine runs where: one or several devices, in this process or in processes of their own."""

import ctypes
import os
from collections.abc import Callable
from functools import partial

from realtime.config import ServerConfig
from realtime.errors import PlosiveError
from realtime.pingpong.api import Engine
from realtime.pingpong.fleet import Fleet
from realtime.pingpong.slots import Slots
from realtime.remote.engine import RemoteEngine, shared_integers

_CPU_SLOTS, _GPU_SLOTS = 4, 64  # of a device, where nothing is said

_VISIBLE = "CUDA_VISIBLE_DEVICES"

LoadEngine = Callable[[ServerConfig, str, Slots], Engine]  # on a device, around the slots


def place(config: ServerConfig, load: LoadEngine) -> Engine:
    """The engine that `--device` and `--engine-process` ask for.

    `load` is a function of a module, so that another process can call it. Slots are shared out
    evenly over the devices.

    Raises:
        PlosiveError: what `load` raises; `invalid_config` for fewer slots than devices.
    """
    devices = config.devices()
    num_devices, num_slots = len(devices), config.max_slots or _default_slots(devices)
    if num_slots < num_devices:
        why = f"max_slots: got {num_slots}, expected at least one for each of {num_devices} devices"
        raise PlosiveError("invalid_config", why)
    if not has_own_process(config):
        return load(config, devices[0], Slots(num_slots, shared_integers(num_slots)))

    def begin(i: int) -> RemoteEngine:
        share = num_slots // num_devices + (i < num_slots % num_devices)
        name = f"engine {i} on {devices[i]}" if num_devices > 1 else f"the engine on {devices[i]}"
        return RemoteEngine(partial(load_alone, load, config, devices[i]), share, name)

    remotes: list[RemoteEngine] = []
    try:
        for i in range(num_devices):
            remotes.append(begin(i))
        engines = [remote.load() for remote in remotes]
    except BaseException:
        for remote in remotes:
            remote.stop()
        raise
    if num_devices == 1:
        return engines[0]
    return Fleet(engines, shared_integers(num_slots), revive=begin)


def load_alone(load: LoadEngine, config: ServerConfig, device: str, slots: Slots) -> Engine:
    """In a process of its own, before anything has asked for the devices: the process sees no other
    GPU than its engine's, so that nothing can land on the wrong one."""
    kind, _, number = device.partition(":")
    try:
        if kind == "cuda" and number:
            os.environ[_VISIBLE] = _visible_id(int(number))
        return load(config, kind, slots)
    except PlosiveError as error:
        raise PlosiveError(error.code, f"{device}: {error.message}") from error


def _visible_id(number: int) -> str:
    """What CUDA calls the device that `cuda:number` is here."""
    visible = os.environ.get(_VISIBLE)
    ids = visible.split(",") if visible is not None else None
    if ids is None:
        return str(number)
    if number >= len(ids):
        raise PlosiveError("model_unusable", f"{_VISIBLE}={visible} leaves no such device")
    return ids[number]


def has_own_process(config: ServerConfig) -> bool:
    """A GPU's engine is driven by Python, which it would share with event loop and Opus. A CPU's spends
    its time in the model's own code, and a small machine has no core for another process."""
    devices = config.devices()
    if len(devices) > 1 or config.engine_process != "auto":
        return len(devices) > 1 or config.engine_process == "yes"
    return devices[0].startswith("cuda") or (devices[0] == "auto" and _has_gpu())


def _default_slots(devices: tuple[str, ...]) -> int:
    is_gpu = [device.startswith("cuda") or (device == "auto" and _has_gpu()) for device in devices]
    return _GPU_SLOTS * sum(is_gpu) or _CPU_SLOTS * len(devices)


def _has_gpu() -> bool:
    """Asked of the driver, so that the server's process needs no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    is_asked = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return is_asked and count.value > 0
