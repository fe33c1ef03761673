"""Uploads to a real S3 server that are killed at random instants and begun again: what `kill_test.py upload` runs."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def kill_uploads(seeds: Iterable[int], ends: Counter[str]) -> list[str]:
    """Run the stories of ``seeds``, count how they went in ``ends``, and return what was wrong."""
    from helpers.s3_servers import seaweedfs, server_directory
    from helpers.upload_kills import UploadKills

    wrong = []
    with server_directory() as place, seaweedfs(place) as server:
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="cwtrain-kills-") as directory:
                story = UploadKills(server, seed, Path(directory))
                try:
                    story.run()
                except AssertionError as error:
                    wrong.append(str(error))
                    print(error, file=sys.stderr)
            ends["killed while uploading"] += story.kills
            ends["completed after that"] += 1
    return wrong
