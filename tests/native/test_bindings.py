"""Python and C++ agree on the kernels: layouts of structs, and arguments of functions.

A field on one side alone would shift all fields after it, and a kernel would read numbers as
addresses.
"""

import ctypes
import logging
import re
import tomllib
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import pytest

from headstart import native
from headstart.native import bindings

FOLDER = Path(native.__file__).parent
BUILT = sorted(FOLDER.glob("_kernels.*"))
INTERFACE = (
    "native_interface",
    "native_level",
    "native_vnni",
)  # called before any other function is declared
SCALARS = {"int64_t": c_int64, "int": c_int, "float": c_float, "void": None}


@pytest.fixture
def library() -> ctypes.CDLL:
    """Return the built library; its layout can be read on a CPU that runs no kernel."""
    if not BUILT:
        pytest.skip("no compiled kernels here")
    return ctypes.CDLL(str(BUILT[0]))


def exported() -> Iterator[tuple[str, list[type], type | None]]:
    """Yield each function `headstart_...` of the sources: name, arguments and result."""
    pattern = re.compile(r"^(?:extern \"C\" )?(\w+) headstart_(\w+)\(([^)]*)\) \{", re.MULTILINE)
    for path in sorted(FOLDER.rglob("*.cpp")):
        for result, name, parameters in pattern.findall(path.read_text()):
            types = [parameter.strip().rpartition(" ")[0] for parameter in parameters.split(",")]
            yield (
                name,
                [c_void_p if "*" in kind else SCALARS[kind] for kind in types if kind],
                (SCALARS[result]),
            )


def test_layouts_are_those_of_the_library(library: ctypes.CDLL) -> None:
    layout = bindings.library_layout(library)
    assert layout == bindings.expected_layout()
    assert {name for name in layout if "." not in name} == {
        *("Segment", "Merger", "AttentionStep", "AttentionCall"),
        *("Weight", "Norm", "Layer", "LayerRun", "Screen"),
        *("Sequences", "States", "Strided", "ConvCall", "DeltaCall", "ScanCall"),
    }
    # Without a compiler's word: addresses and int64 take 8 bytes, int32 and float 4.
    assert layout["AttentionCall.heads"] == 9 * 8 + 3 * 2 * 8
    assert layout["Layer.head_dim"] == 7 * layout["Weight"] + 6 * layout["Norm"]


def test_signatures_are_those_of_the_sources() -> None:
    declared = {name: ([*arguments], None) for name, arguments in bindings._FUNCTIONS.items()}
    signatures = {name: (arguments, result) for name, arguments, result in exported()}
    assert {name: signatures.pop(name)[1] for name in INTERFACE} == dict.fromkeys(INTERFACE, c_int)
    assert signatures == declared


def test_every_function_of_the_library_gets_its_signature(library: ctypes.CDLL) -> None:
    bindings.declare_signatures(library)
    for name, arguments in bindings._FUNCTIONS.items():
        function = getattr(library, f"headstart_{name}")
        assert (function.argtypes, function.restype) == (arguments, None)


def test_a_library_with_other_layouts_is_not_used(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    layout = bindings.library_layout(library) | {"Weight": 64, "Weight.inputs": 40}
    monkeypatch.setattr(bindings, "library_layout", lambda _: layout)
    assert native._load.__wrapped__(BUILT[0].parent) is None
    assert [record.getMessage() for record in logged] == [
        "compiled kernels are not used: Weight is 64 in C++ and 56 in Python (bytes)"
    ]


def test_every_source_and_header_is_listed_in_the_build() -> None:
    """A change of a header that is not listed rebuilds nothing, and no sdist contains it."""
    root = FOLDER.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    [kernels] = project["tool"]["setuptools"]["ext-modules"]
    named = {*kernels["sources"], *kernels["depends"]}
    there = [*FOLDER.rglob("*.cpp"), *FOLDER.rglob("*.h")]
    assert named == {path.relative_to(root).as_posix() for path in there}
