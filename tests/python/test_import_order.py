"""Modules of the package import each other in an order: there is no circle."""

import ast
import pathlib

import qattn

PACKAGE = pathlib.Path(qattn.__file__).resolve().parent


def runs_at_import(tree):
    """The import statements that importing a module runs."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += node.body + node.orelse
        elif isinstance(node, (ast.Try, ast.With)):
            waiting += node.body


def named(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports():
    """{module: those that it imports}, of the package's own, "" being itself."""
    files = {named(f): f for f in PACKAGE.rglob("*.py*") if f.suffix in (".py", ".pyi")}
    found = {}
    for name, file in files.items():
        folder = named(file.parent / "__init__.py")
        found[name] = set()
        for node in runs_at_import(ast.parse(file.read_text())):
            if node.level == 0:
                continue
            base = folder.split(".") if folder else []
            base = base[: len(base) - node.level + 1] + (node.module or "").split(".")
            source = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{source}.{alias.name}" if source else alias.name
                found[name].add(inner if inner in files else source)
        found[name] &= files.keys() - {name}
    return found


def circle(graph):
    """A list of modules of which each imports the next, and the last the first; or none."""
    done = set()

    def walk(name, path):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        done.add(name)
        return next(filter(None, (walk(x, [*path, name]) for x in sorted(graph[name]))), None)

    return next(filter(None, (walk(name, []) for name in sorted(graph))), None)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_no_modules_import_each_other():
    graph = imports()
    assert "torch._library" in graph["torch._ops"] and "_errors" in graph["cache._host"]
    assert circle(graph) is None
