"""A job file, read into plain mappings, lists and texts; nothing is interpreted here.

YAML guesses types from spelling (`1e-4` is a text, `on` a truth, `010` is eight, `1.10` is 1.1)
and guesses wrong for names and revisions. So scalars stay the text that was written, null aside,
and the type of the field decides later. Duplicate keys and endless files are refused.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import cast

import yaml

from tlora.config.values import Tree, is_tree, listed
from tlora.core.errors import SpecError

MAX_NODES = 1_000_000
"""Values in a file once its anchors are written out: some ten thousand jobs."""

DATA_SUFFIXES = {".jsonl", ".ndjson", ".csv", ".parquet"}
JOB_SUFFIXES = {".yaml", ".yml"}
"""JSON may be either, and is left out."""

KEPT_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")

Resolvers = dict[str, list[tuple[str, object]]]


@dataclass(frozen=True, slots=True)
class Document:
    """What a source holds, and the folder that its relative paths start from."""

    tree: Tree
    folder: Path
    name: str = "this"
    """What messages call it."""


class TextLoader(yaml.SafeLoader):
    """Resolves null and merge keys; every other plain scalar stays a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way to set them)
        first: [(tag, pattern) for tag, pattern in pairs if tag in KEPT_TAGS]
        for first, pairs in cast(Resolvers, yaml.SafeLoader.yaml_implicit_resolvers).items()
    }


def read_source(source: str | os.PathLike[str] | Mapping[str, object]) -> Document:
    """Raises SpecError where the source cannot be read as a mapping."""
    if isinstance(source, Mapping):
        tree, name, folder = plain(source), "this", Path.cwd()
    else:
        path = Path(source).expanduser()
        text = read_text(path)
        tree = (
            parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
        )
        name, folder = str(path), path.absolute().parent
    if not is_tree(tree):
        raise SpecError(f"{name}: must be a mapping with 'base' and 'jobs'")
    return Document(tree, folder, name)


def read_text(path: Path) -> str:
    if DATA_SUFFIXES & {suffix.lower() for suffix in path.suffixes}:
        raise SpecError(
            f"{path}: this is data, not a job file; name it in one, as data: {{path: {path.name}}}"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file{job_files_beside(path)}") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a directory{job_files_in(path)}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def job_files_beside(path: Path) -> str:
    """The file that was meant, as far as it can be guessed."""
    names = yaml_files(path.parent)
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"; did you mean '{path.with_name(close[0])}'?"
    return f"; this folder has {listed(names)}" if names else ""


def job_files_in(folder: Path) -> str:
    """What a directory was given for."""
    names = yaml_files(folder)
    return f"; name a job file, such as '{folder / names[0]}'" if names else "; name a job file"


def yaml_files(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.suffix in JOB_SUFFIXES)
    except OSError:
        return []


def plain(value: object) -> object:
    """A caller's value in the same few types that a file gives."""
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): plain(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast(list[object], value)]
    if isinstance(value, os.PathLike):
        return str(cast(os.PathLike[str], value))
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def parse_json(text: str, name: str) -> object:
    def without_duplicates(pairs: list[tuple[str, object]]) -> Tree:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise SpecError(f"{name}: the key '{twice}' stands twice in one mapping")
        return tree

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        raise SpecError(f"{name}:{error.lineno}:{error.colno}: {error.msg}") from None
    except RecursionError:
        raise SpecError(f"{name}: nested too deeply") from None


def parse_yaml(text: str, name: str) -> object:
    """The one document in the text. Raises SpecError with file, line and column."""
    try:
        loader = TextLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            check_nodes(node, name)
            return plain(cast(object, loader.construct_document(node)))  # pyright: ignore[reportUnknownMemberType]
        finally:
            loader.dispose()  # pyright: ignore[reportUnknownMemberType]
    except yaml.MarkedYAMLError as error:
        raise SpecError(describe_syntax(error, name)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(f"{name}:{line}: a character that YAML does not allow") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{name}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SpecError(f"{name}: nested too deeply") from None


def describe_syntax(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    hint = " (YAML is indented with spaces, not tabs)" if "\\t" in problem else ""
    return f"{place}: {problem}{hint}"


def check_nodes(root: yaml.Node, name: str) -> None:
    """Refuses duplicate keys, anchors within themselves, and anchors that unfold too far."""
    sizes: dict[yaml.Node, int] = {}
    open_nodes: set[yaml.Node] = set()

    def size(node: yaml.Node) -> int:
        if node in sizes:
            return sizes[node]
        line = node.start_mark.line + 1
        if node in open_nodes:
            raise SpecError(f"{name}:{line}: an anchor that holds itself")
        open_nodes.add(node)
        refuse_duplicates(node, name)
        total = 1 + sum(size(child) for child in children(node))
        if total > MAX_NODES:
            raise SpecError(f"{name}:{line}: anchors unfold to more than {MAX_NODES:,} values")
        open_nodes.remove(node)
        sizes[node] = total
        return total

    size(root)


def children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in cast(list[tuple[yaml.Node, yaml.Node]], node.value):
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from cast(list[yaml.Node], node.value)


def refuse_duplicates(node: yaml.Node, name: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, _ in cast(list[tuple[yaml.Node, yaml.Node]], node.value):
        if isinstance(key, yaml.ScalarNode):
            text, mark = str(key.value), key.start_mark
            if text in seen:
                place = f"{name}:{mark.line + 1}:{mark.column + 1}"
                raise SpecError(f"{place}: the key '{text}' stands twice in one mapping")
            seen.add(text)
