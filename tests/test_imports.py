"""The shape of the package, read from its source: imports run one way, one place talks to the network, one reads the
environment, and `import megalite` is cheap.

An import counts wherever it stands, in a function too. Under `if TYPE_CHECKING:` it binds nothing at run time and is
for annotations: there it may also point against an arrow, but never join two parts that no arrow joins.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import megalite

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megalite"

# part -> the parts that it imports; what those import, it may import as well
ARROWS = {
    "mesh": [],
    "weight_grad": [],
    "data": [],
    "comm": ["mesh"],
    "spec": ["mesh"],
    "layers": ["comm", "spec", "weight_grad"],
    "models": ["layers"],
    "styles": ["layers"],
    "zero": ["spec", "comm"],
    "checkpoint": ["zero"],
    "pipeline": ["weight_grad", "comm", "mesh"],
    "cost": ["mesh", "models.config", "models.part", "pipeline.schedule", "pipeline.simulate"],
    "train": ["models", "data", "zero", "checkpoint", "pipeline", "cost"],
}
TOOLS = {"convert", "generate", "plan", "plot", "parity"}  # a thin main each: may import all, and nothing imports them

# names of torch.distributed, by what they do, and the files that may use them
TALK = re.compile(
    r"(all_|reduce|broadcast|gather|scatter|i?send|i?recv|batch_isend|barrier|monitored_barrier)\w*$|P2POp$"
    r"|nn$|_functional_collectives$|_symmetric_memory$"
)
GROUPS = re.compile(r"new_group|new_subgroups|split_group|shrink_group")
LIFE = re.compile(r"(init|destroy)_process_group$")


def uses(name: str) -> set[str]:
    """All parts that `name` may import: the arrows, followed to the end."""
    direct = set(ARROWS.get(name, []))
    return direct.union(*(uses(other) for other in direct))


class Import(NamedTuple):
    line: int
    module: str  # absolute: megalite.pipeline.schedule
    name: str  # what is taken out of it, "" for the module itself
    typing_only: bool


def imports(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """Every import in `source`, also by importlib with a literal name; relative ones made absolute."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        hidden = id(node) in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, "", hidden)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source_module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, source_module, alias.name, hidden)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(node.lineno, str(name), "", hidden) for name in names)


def wrong_arrows(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports of `module` that no arrow allows, each as one line of complaint."""
    part = module.split(".")[1] if "." in module else ""
    if not part or part in TOOLS:  # the root gives names lazily, the tools stand on top
        return []
    if part not in ARROWS:
        return [f"{module} belongs to no known part; say in tests/test_imports.py what {part} may import"]
    found = []
    for entry in imports(source, module, is_package=is_package):
        full = f"{entry.module}.{entry.name}" if entry.module == "megalite" and entry.name else entry.module
        if full.split(".")[0] != "megalite" or full == "megalite.__version__":
            continue
        path = [*full.split(".")[1:], *([entry.name] if entry.module == full else [])]
        other = path[0]
        named = {other, ".".join(path[:2])}
        along = other == part or bool(named & uses(part))
        against = part in uses(other)
        if not along and not (entry.typing_only and against):
            what = full if other in ARROWS or other in TOOLS else f"{full}, which is the root: name the module instead"
            found.append(f"{module}:{entry.line} imports {what}; {part} may import {sorted(uses(part)) or 'nothing'}")
    return found


def distributed_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) for each name of torch.distributed that `source` uses, whatever it calls the module."""
    tree = ast.parse(source)
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.distributed"):
                    aliases.add(alias.asname or alias.name)
                    yield node.lineno, alias.name.removeprefix("torch.distributed").lstrip(".")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases.update(alias.asname or alias.name for alias in node.names if alias.name == "distributed")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            for name in (node.module or "").split(".")[2:]:
                yield node.lineno, name
            for alias in node.names:
                yield node.lineno, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            yield node.lineno, node.attr


def wrong_places(source: str, file: str) -> list[str]:
    """Uses of torch.distributed and of the environment in a file that has no business with them."""
    in_comm = file.startswith("comm/")
    found = []
    for line, name in distributed_names(source):
        if TALK.match(name) and not in_comm:
            found.append(f"{file}:{line} uses torch.distributed.{name}; only megalite/comm talks to other ranks")
        if GROUPS.match(name) and not (in_comm or file == "mesh.py"):
            found.append(f"{file}:{line} uses torch.distributed.{name}; groups are made in megalite/mesh.py")
        if LIFE.match(name) and file not in ("train/launch.py", "comm/start.py"):
            found.append(f"{file}:{line} uses torch.distributed.{name}; only train/launch.py and comm/start.py may")
    if file != "train/launch.py":
        found += [
            f"{file}:{line} reads the environment; only megalite/train/launch.py does"
            for line in environment(source, may_set=file == "data/workers.py")
        ]
    return found


def environment(source: str, *, may_set: bool) -> Iterator[int]:
    """Lines that touch the environment of the process; with may_set, those that only give a variable a value pass."""
    names = ("environ", "environb", "getenv", "getenvb", "putenv")
    tree = ast.parse(source)
    set_here = {
        id(target.value)
        for node in ast.walk(tree)
        if may_set and isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript)
    }
    for node in ast.walk(tree):
        if id(node) in set_here:
            continue
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in names)


def modules() -> list[tuple[Path, str, bool]]:
    """(file, dotted name, is it a package) of everything in megalite."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        found.append((path, ".".join(parts[:-1] if is_package else parts), is_package))
    return found


def test_imports_run_one_way_only():
    complaints = [
        complaint
        for path, module, is_package in modules()
        for complaint in wrong_arrows(path.read_text(), module, is_package=is_package)
    ]
    assert not complaints, "\n".join(complaints)


def test_one_part_talks_to_other_ranks_and_one_file_reads_the_environment():
    files = [(path, path.relative_to(PACKAGE).as_posix()) for path, _, _ in modules()]
    files += [(path, path.name) for path in ROOT.glob("*.py")]
    complaints = [complaint for path, name in files for complaint in wrong_places(path.read_text(), name)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("megalite.comm.collectives", "from megalite.mesh import Axis", True),
        ("megalite.models.gpt", "from megalite.spec import ParamSpec", True),
        ("megalite.layers.linear", "from ..comm import reduce", True),
        ("megalite.layers.linear", "from . import norm", True),
        ("megalite.cost.plan", "from megalite.pipeline.schedule import gpipe", True),
        ("megalite.cost.plan", "from megalite.pipeline import simulate", True),
        ("megalite.plan.__main__", "import megalite.cost, megalite.models", True),
        ("megalite.mesh", "if TYPE_CHECKING:\n    from megalite.spec import ParamSpec", True),
        ("megalite.mesh", "from megalite.spec import ParamSpec", False),
        ("megalite.mesh", "def f():\n    from megalite.comm import copy", False),
        ("megalite.styles.plan", "from megalite.layers import linear", True),
        ("megalite.styles.plan", "from megalite.zero import Zero", False),
        ("megalite.models.gpt", "from megalite.styles import parallelize", False),
        ("megalite.zero.zero", "from megalite.layers import linear", False),
        ("megalite.zero.zero", "from megalite import layers", False),
        ("megalite.zero.zero", "from ..layers import linear", False),
        ("megalite.zero.zero", "if TYPE_CHECKING:\n    from megalite.layers import linear", False),
        ("megalite.pipeline.execute", "import megalite.zero", False),
        ("megalite.pipeline.execute", "importlib.import_module('megalite.models.gpt')", False),
        ("megalite.layers.linear", "from megalite import Axis", False),
        ("megalite.layers.linear", "from megalite.plan import x", False),
        ("megalite.cost.plan", "from megalite.pipeline.execute import Pipeline", False),
        ("megalite.data.order", "import megalite.mesh", False),
        ("megalite.misc", "import os", False),
    ],
)
def test_the_reader_of_arrows_sees_every_form_of_import(module, line, allowed):
    assert (wrong_arrows(line, module) == []) == allowed


@pytest.mark.parametrize(
    ("file", "source", "allowed"),
    [
        ("comm/collectives.py", "import torch.distributed as dist\ndist.all_reduce(x)", True),
        ("mesh.py", "import torch.distributed as dist\ndist.new_group([0])", True),
        ("train/launch.py", "import os\nimport torch.distributed as d\nd.init_process_group(os.environ['RANK'])", True),
        ("zero/zero.py", "import torch.distributed as dist\nx: dist.ProcessGroup = dist.ReduceOp.SUM", True),
        ("zero/zero.py", "import torch.distributed as dist\ndist.all_reduce(x)", False),
        ("zero/zero.py", "import torch\ntorch.distributed.barrier()", False),
        ("zero/zero.py", "from torch import distributed\ndistributed.isend(x, 1)", False),
        ("zero/zero.py", "from torch.distributed import reduce_scatter_tensor", False),
        ("zero/zero.py", "import torch.distributed._functional_collectives as fc", False),
        ("pipeline/execute.py", "import torch.distributed as dist\ndist.new_group([0])", False),
        ("zero/zero.py", "import torch.distributed as dist\ndist.destroy_process_group()", False),
        ("mesh.py", "import os\nos.getenv('RANK')", False),
        ("mesh.py", "import os\nos.environ['X'] = '1'", False),
        ("data/workers.py", "import os\nos.environ['X'] = '1'", True),
        ("data/workers.py", "import os\nx['y'] = os.environ['X']", False),
        ("train.py", "from os import environ", False),
    ],
)
def test_the_reader_of_places_sees_every_form_of_use(file, source, allowed):
    assert (wrong_places(source, file) == []) == allowed


# What the planner, the data tools and `--help` import must not cost an import of torch.
WITHOUT_TORCH = [
    "megalite",
    "megalite.mesh",
    "megalite.data",
    "megalite.data.command",
    "megalite.models.config",
    "megalite.train.config",
    "megalite.train.launch",
    "megalite.train.expect",
    "megalite.pipeline.split",
    "megalite.pipeline.command",  # and with it schedule, the catalogue, lower, simulate and draw
]


def test_what_needs_no_torch_imports_none():
    program = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_every_public_name_is_given_and_dir_lists_them_all():
    assert set(megalite.__all__) < set(dir(megalite))
    for name in megalite.__all__:
        assert getattr(megalite, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = megalite.no_such_name
