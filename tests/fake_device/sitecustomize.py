"""What Python imports when it starts, where `fake.install` has put this beside the fake device: it is on this machine.

stagec asks the kernel for devices before it loads a plugin. Here it asks folders.
"""

import os
from pathlib import Path

from stagec.pjrt import accelerators

accelerators._DEVICES = Path(__file__).with_name("dev")
accelerators._PCI = Path(__file__).with_name("pci")

if os.environ.get("STAGEC_FAKE_DRIVER") == "rocm":  # XLA's plugin is linked with ROCm
    from stagec_rehearse import driver

    driver.load("rocm")
if os.environ.get("STAGEC_FAKE_COMPILER"):
    from tests.fake_device import compiling

    compiling.replace()
