"""The study of draft heads in a short form: runs, resumption, tables and picture."""

import json

from bench.studies.drafts import Sizes, arms, draw, key, tables, train


def test_short_form(tmp_path, capsys):
    file, sizes = tmp_path / "runs.json", Sizes(decoder_steps=1, draft_steps=1, rows=1, contexts=2)
    found = train(file, [0, 1], sizes)
    assert set(found["runs"]) == {key(arm, s) for arm in ("untrained", *arms()) for s in (0, 1)}
    assert all(0 <= run["accepted"] <= 6 for run in found["runs"].values())

    lost = found["runs"].pop(key("LK", 1))
    file.write_text(json.dumps(found))
    capsys.readouterr()
    again = train(file, [0, 1], sizes)
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed" in line]
    assert [line.partition(" {")[0] for line in lines] == [key("LK", 1)]
    for name in ("accepted", "error"):
        assert again["runs"][key("LK", 1)][name] == lost[name]

    lines = tables(again, [0, 1]).splitlines()
    for arm in arms():
        assert sum(line.startswith(f"| {arm} |") for line in lines) == 1
    draw(again, [0, 1]).savefig(tmp_path / "accepted.png")
