"""fastkd's kernels on `tools.ptx`: public calls on CPU tensors run Triton's compiled code.

`forms` executes every compiled form, `count` writes the counts of docs/kernels.md, and `plugin`
runs tests on compiled code.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from tools import ptx
from tools.compile_report import Form
from tools.ptx.compiled import Launches


@contextlib.contextmanager
def executing(capability: int, *, forms: set[Form] | None = None) -> Iterator[Launches]:
    """`tools.ptx.executing` for fastkd's functions; ``forms`` collects the forms launched."""
    from fastkd._core import dispatch
    from fastkd.kernels import launch

    def note(*compiled: object) -> None:
        if forms is not None:
            forms.add(Form.from_launch(*compiled))

    with (
        mock.patch.object(dispatch, "triton_devices", lambda: ("cuda", "cpu")),
        mock.patch.object(launch, "capability", lambda device: capability // 10),
        ptx.executing(capability, on_compile=note) as launches,
    ):
        yield launches
