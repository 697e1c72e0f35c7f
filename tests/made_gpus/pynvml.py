"""A driver with as many GPUs as MADE_GPUS says, for machines without any: the calls that the project makes.

``MADE_GPUS=3`` makes GPU-0, GPU-1 and GPU-2. ``MADE_GPUS=1,2`` makes GPU-0, and a GPU in two instances (MIG).
"""

import os


class NVMLError(Exception):
    """The error of a missing driver, and of each call that a GPU does not support."""


def nvmlInit():
    if not os.environ.get("MADE_GPUS"):
        raise NVMLError("no driver")


def _instances():
    """Return the number of instances of each GPU; one means that it is not divided."""
    made = [int(number) for number in os.environ["MADE_GPUS"].split(",")]
    return made if len(made) > 1 else [1] * made[0]


def nvmlDeviceGetCount():
    return len(_instances())


def nvmlDeviceGetHandleByIndex(number):
    return f"GPU-{number}"


def nvmlDeviceGetUUID(device):
    return device


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetMigMode(device):
    if len({*_instances()}) == 1:
        raise NVMLError("not supported")
    return [_instances()[int(device[-1])] > 1] * 2


def nvmlDeviceGetMaxMigDeviceCount(device):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(device, place):
    if place >= _instances()[int(device[-1])]:
        raise NVMLError("not found")
    return f"MIG-{device[-1]}-{place}"


def _unsupported(device):
    raise NVMLError("not supported")


nvmlDeviceGetTotalEnergyConsumption = nvmlDeviceGetMemoryInfo = nvmlDeviceGetUtilizationRates = _unsupported
nvmlDeviceGetPowerUsage = _unsupported
