"""The tree itself: layers, what an import costs, public names, generated code."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "atoll"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "proto" not in p.parts)
HEAVY = {
    "torch",
    "numpy",
    "grpc",
    "fastapi",
    "uvicorn",
    "sqlalchemy",
    "pydantic",
    "httpx",
    "transformers",
}
SYNCS = {"fsync", "fdatasync"}
MAX_TRACKED_BYTES = 1_000_000
MAX_CHECKOUT_BYTES = 7_000_000  # of all tracked files; they are 6.5 MB, half of it tests
BANNED_MODULE_NAMES = {"utils", "helpers", "common", "misc", "manager", "core"}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `code`."""
    shown = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, check=True, timeout=60
    )
    names: list[str] = json.loads(done.stderr.splitlines()[-1])
    return {name.partition(".")[0] for name in names}


def test_runs_of_rounds_load_no_loops_that_only_a_gather_uses():
    """All loops that are imported are compiled before a large run uses any of them."""
    code = (
        "import atoll.cli.serve, atoll.cli.join, atoll.coordinator.boot, atoll.island.run, sys\n"
        "ours = ('atoll.gather.loops', 'atoll.codecs.topk.loops', 'atoll.codecs.topk.codec')\n"
        "sys.exit(', '.join(name for name in ours if name in sys.modules) or 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_import_contracts_hold():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def syncs(source: str) -> bool:
    """Whether a module names a system call that syncs, however it came by it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                if name in SYNCS:
                    return True
            case ast.Constant(value=str() as name) if name in SYNCS:
                return True
    return False


def test_only_the_module_of_durable_files_syncs():
    """One place decides what a failed sync means: the process ends and never tries again."""
    asking = [str(p.relative_to(PACKAGE)) for p in MODULES if syncs(p.read_text())]

    assert asking == ["files.py"]


@pytest.mark.parametrize(
    "line",
    [
        "os.fsync(fd)",
        "import os as system\nsystem.fdatasync(fd)",
        "from os import fsync",
        "from os import fdatasync as settle",
        "getattr(os, 'fsync')(fd)",
    ],
)
def test_sync_is_found_however_it_is_called(line):
    assert syncs(line)


@pytest.mark.parametrize("line", ["files.sync(fd)", "sync = 'os.fsync'", "# os.fsync\nx = 1"])
def test_own_sync_and_mere_words_are_no_system_call(line):
    assert not syncs(line)


def test_import_of_the_package_loads_nothing_heavy():
    """The import contracts do not see a root that reaches up."""
    loaded = loaded_by("import atoll")

    assert "atoll" in loaded
    assert loaded & HEAVY == set()


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['atoll', '--help']\n"
        "from atoll.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code, done.code"
    )

    assert loaded_by(code) & HEAVY == set()


def test_built_in_model_does_not_load_transformers():
    """It takes seconds, and it is optional."""
    size = {"vocab": 8, "block": 4, "layers": 1, "heads": 2, "width": 8}
    code = (
        "from atoll.cli import join, serve\n"
        "from atoll.models import registry\n"
        f"registry.build({{'architecture': 'gpt', **{size}}})"
    )

    assert "transformers" not in loaded_by(code)


def test_errors_and_clock_need_no_torch():
    assert (
        loaded_by("import atoll.errors, atoll.ids, atoll.clock, atoll.canonical") & HEAVY == set()
    )


def test_settings_are_read_without_torch_and_what_they_build_is_not():
    """`atoll info` and the control plane read manifests; the second half is the control."""
    read = (
        "from atoll.protocol.manifest import Manifest\n"
        "fields = Manifest.model_fields\n"
        "upload = fields['upload'].annotation.model_validate({'codec': 'int8'})\n"
        "outer = fields['outer'].annotation.model_validate({'optimizer': 'adam'})\n"
    )

    assert "torch" not in loaded_by(read)
    assert "torch" in loaded_by(f"{read}upload.build()")
    assert "torch" in loaded_by(f"{read}outer.build()")


@pytest.mark.parametrize("name", atoll.__all__)
def test_public_name_is_there(name):
    assert getattr(atoll, name) is not None


def test_public_names_are_what_the_readme_promises():
    assert set(atoll.__all__) == {"Run", "__version__", "get_info", "join"}


def test_unknown_name_of_the_package_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'joyn'"):
        _ = atoll.joyn


def test_version_is_that_of_the_installed_package():
    metadata = importlib.import_module("importlib.metadata")

    assert atoll.__version__ == metadata.version("atoll")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_says_what_it_is_for(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[:1]

    assert first and first[0]


def test_no_module_is_named_after_nothing():
    assert [p for p in MODULES if p.stem in BANNED_MODULE_NAMES] == []


def naming(pattern: str) -> list[str]:
    """Modules of the package whose text matches `pattern`."""
    found = [path for path in MODULES if re.search(pattern, path.read_text())]
    return [str(path.relative_to(PACKAGE)) for path in found]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_codec_is_named_by_its_own_folder_and_the_registry_alone(codec):
    named = naming(rf"codecs\.{codec}\b")

    assert [name for name in named if f"codecs/{codec}/" not in name] == ["codecs/registry.py"]


def test_threads_of_torch_are_set_in_one_place():
    assert naming("set_num_threads") == ["torch_threads.py"]


def tracked(root: Path) -> dict[str, int]:
    """Files that git tracks below `root`, with their bytes: every clone carries them for ever."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    names = [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    return {name: (root / name).stat().st_size for name in names}


def oversized(root: Path) -> list[str]:
    """Tracked files that are larger than any of ours needs to be."""
    return [name for name, nbytes in tracked(root).items() if nbytes > MAX_TRACKED_BYTES]


def test_no_tracked_file_is_large():
    assert oversized(ROOT) == []


def test_checkout_is_small():
    found = tracked(ROOT)

    assert "pyproject.toml" in found
    assert sum(found.values()) < MAX_CHECKOUT_BYTES


def test_large_tracked_file_is_found(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "left.bin").write_bytes(b"0" * (MAX_TRACKED_BYTES + 1))
    (tmp_path / "small.txt").write_text("kept")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True, timeout=60)

    assert oversized(tmp_path) == ["left.bin"]


def test_packages_export_nothing_by_accident():
    """Own code is imported as modules; the `__init__` of a package inside is a docstring."""
    crowded = [
        path.parent.name
        for path in MODULES
        if path.name == "__init__.py"
        and path.parent not in (PACKAGE, PACKAGE / "cli", PACKAGE / "pools")
        and len(ast.parse(path.read_text()).body) != 1
    ]

    assert crowded == []


def test_generated_code_is_what_the_generator_gives(tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I.",
            f"--python_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            f"--plugin=protoc-gen-mypy={Path(sys.executable).with_name('protoc-gen-mypy')}",
            f"--mypy_out={tmp_path}",
            "atoll/wire/proto/transfer.proto",
        ],
        cwd=ROOT / "src",
        check=True,
        capture_output=True,
        timeout=60,
    )

    generated = sorted(p for p in (tmp_path / "atoll/wire/proto").iterdir())
    assert [p.name for p in generated] == [
        "transfer_pb2.py",
        "transfer_pb2.pyi",
        "transfer_pb2_grpc.py",
    ]
    for path in generated:
        assert path.read_text() == (PACKAGE / "wire/proto" / path.name).read_text(), path.name
