# SPDX-License-Identifier: Apache-2.0
"""The card: a Gaudi 3."""

import enum


class synDeviceType(enum.Enum):
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type():
    return synDeviceType.synDeviceGaudi3


def _data_ptr(tensor):
    return tensor.data_ptr()
