"""Entry points read from disk: the same as ``importlib.metadata`` finds, which need not be imported for them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile

import pytest

from cwtrain.plugins._entry_points import FoundEntryPoint, entry_points, found_entry_points


def distribution(folder, name, text, *, version="1.0", meta_name=None, suffix=".dist-info", meta="METADATA"):
    info = folder / f"{name}-{version}{suffix}"
    info.mkdir(parents=True)
    (info / meta).write_text(
        f"Metadata-Version: 2.1\nName: {meta_name or name}\nVersion: {version}\n\nName: not this one\n"
    )
    (info / "entry_points.txt").write_text(text)
    return info


def told(entries):
    return sorted((entry.name, entry.value, entry.dist.name, entry.dist.version) for entry in entries)


def by_the_library(*folders):
    found = importlib.metadata.distributions(path=[str(folder) for folder in folders])
    first = {}
    for dist in found:
        # An empty folder, a file with a folder's name. Not `.name`: from 3.12 on it warns of the None it returns.
        name = dist.metadata.get("Name")
        if name is None:
            continue
        first.setdefault(name.lower().replace("-", "_").replace(".", "_"), dist)
    return [entry for dist in first.values() for entry in dist.entry_points if entry.group == "cwtrain"]


def test_this_environment_has_the_same_either_way():
    found = list(found_entry_points("cwtrain", sys.path))
    assert told(found) == told(importlib.metadata.entry_points(group="cwtrain"))
    for entry, other in zip(
        sorted(found), sorted(importlib.metadata.entry_points(group="cwtrain"), key=lambda e: e.name), strict=True
    ):
        assert entry.load() is other.load()


def test_other_groups_comments_blanks_and_odd_folders(tmp_path):
    distribution(
        tmp_path,
        "mine_plugin",
        "[console_scripts]\nx = y:z\n\n[cwtrain]\n# remark\n\n one=mine.one \ntwo = mine:a.b [more]\n[b]\nq = r\n",
        meta_name="Mine.Plugin",
        version="2.0rc1",
    )
    distribution(tmp_path, "old", "[cwtrain]\nold = old\n", suffix="-py3.11.egg-info", meta="PKG-INFO")
    (tmp_path / "empty-1.dist-info").mkdir()
    (tmp_path / "file.dist-info").write_text("")
    found = list(found_entry_points("cwtrain", [str(tmp_path), str(tmp_path / "nowhere"), str(tmp_path)]))
    assert told(found) == told(by_the_library(tmp_path))
    assert told(found)[0] == ("old", "old", "old", "1.0")
    assert {entry.dist.name for entry in found} == {"Mine.Plugin", "old"}


def test_of_two_distributions_of_one_name_the_first_on_the_path_counts(tmp_path):
    distribution(tmp_path / "a", "same_name", "[cwtrain]\nnew = new\n", version="2")
    distribution(tmp_path / "b", "Same.Name", "[cwtrain]\nold = old\n", version="1")
    folders = [tmp_path / "a", tmp_path / "b"]
    found = list(found_entry_points("cwtrain", map(str, folders)))
    assert [entry.name for entry in found] == ["new"]
    assert told(found) == told(by_the_library(*folders))


@pytest.mark.parametrize("value", ["os.path", "os:path", "os:path.join", "os:path [extra]", " os : path.join "])
def test_what_an_entry_point_names_is_loaded_as_the_library_does(value):
    found = FoundEntryPoint("x", value, None)
    assert found.load() is importlib.metadata.EntryPoint("x", value.strip(), "cwtrain").load()
    assert found.load() in (os.path, os.path.join)


def test_a_zip_file_on_the_path_may_bring_plugins_too(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as bundle:
        bundle.writestr("zipped-1.dist-info/METADATA", "Name: zipped\nVersion: 1\n")
        bundle.writestr("zipped-1.dist-info/entry_points.txt", "[cwtrain]\nfrom_zip = os\n")
    monkeypatch.syspath_prepend(str(tmp_path / "bundle.zip"))
    assert "from_zip" in [entry.name for entry in entry_points("cwtrain")]


def test_a_finder_of_its_own_is_asked(monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return None

        @staticmethod
        def find_distributions(context):
            class Brought(importlib.metadata.Distribution):
                def read_text(self, filename):
                    texts = {"METADATA": "Name: brought\nVersion: 3\n", "entry_points.txt": "[cwtrain]\nbrought = os\n"}
                    return texts.get(filename)

                def locate_file(self, path):
                    return path

            return [Brought()]

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert "brought" in [entry.name for entry in entry_points("cwtrain")]


def test_core_alone_finds_plugins_without_the_library():
    code = (
        "import sys; from cwtrain.plugins import specs, _entry_points; from cwtrain.cli import main\n"
        "_entry_points.entry_points('cwtrain')\n"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
