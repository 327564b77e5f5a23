"""No Parquet file is read by Arrow's threads, which abort a process that ends soon after."""

from __future__ import annotations

import ast

from tests.repository.test_architecture import modules

READS = {"read", "iter_batches", "read_row_group"}


def test_parquet_is_read_without_threads() -> None:
    read = [
        (path, node)
        for room in ("stages", "pipeline", "parallel")
        for path, tree in modules(room)
        if "pyarrow.parquet" in ast.unparse(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in READS
        and "file.read" not in ast.unparse(node)
    ]
    assert len(read) >= 6
    for path, node in read:
        assert "use_threads=False" in ast.unparse(node), (path, ast.unparse(node))
