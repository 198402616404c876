"""Files appear whole or not at all."""

import json
import resource
import tempfile
from pathlib import Path

import chex
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax import files

BIG = np.arange(10_000, dtype=np.float64)
WRITERS = {
    "text": lambda path: files.write_file(path, "x" * 10_000),
    "json": lambda path: files.write_json(path, list(range(10_000))),
    "arrays": lambda path: files.write_arrays(path, {"a": BIG}),
    "compressed": lambda path: files.write_arrays(path, {"a": BIG}, compress=True),
}


class FilesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def test_content(self):
        files.write_file(self.folder / "a" / "b" / "text", "a \ud800 \u00e4")
        text = (self.folder / "a" / "b" / "text").read_text(encoding="utf-8", errors="surrogatepass")
        self.assertEqual(text, "a \ud800 \u00e4")
        files.write_json(self.folder / "plain.json", {"b": 1, "a": 2}, sort_keys=True)
        self.assertEqual((self.folder / "plain.json").read_text(), '{"a": 2, "b": 1}\n')
        for compress in (False, True):
            files.write_arrays(self.folder / "arrays.npz", {"x/y": BIG}, compress=compress)
            with np.load(self.folder / "arrays.npz") as stored:
                chex.assert_trees_all_equal(dict(stored), {"x/y": BIG})
        self.assertEqual(self.names(), ["a/b/text", "arrays.npz", "plain.json"])

    @parameterized.parameters(*WRITERS)
    def test_full_disk_keeps_the_old_file(self, name):
        path = self.folder / "file"
        path.write_text(json.dumps("old"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        with self.assertRaisesRegex(files.FileError, r"file': cannot be written \(File too large\), allowed: a place"):
            WRITERS[name](path)
        self.assertEqual(self.names(), ["file"])
        self.assertEqual(path.read_text(), '"old"')

    def test_a_file_where_a_folder_must_be(self):
        (self.folder / "file").write_text("")
        for write in (lambda path: files.write_file(path, ""), files.make_folder):
            with self.assertRaisesRegex(files.FileError, r"file/b/c': cannot be written \(Not a directory\)"):
                write(self.folder / "file" / "b" / "c")
        with self.assertRaisesRegex(files.FileError, r"file': cannot be written \(File exists\)"):
            files.make_folder(self.folder / "file")


if __name__ == "__main__":
    absltest.main()
