from __future__ import annotations

from aexec.executor.multiproc.recipe import installed_devices


def test_devices_are_counted_without_cuda(tmp_path):
    """As the kernel driver lists them; importing torch in the driver would take seconds, and memory of a device."""
    assert installed_devices(tmp_path) == ()
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert installed_devices(tmp_path) == ("0", "1")
