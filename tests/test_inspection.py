"""What a person sees of verdicts: the table by benchmark, and samples found from where they lie."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from erpo.__main__ import main
from erpo.checkpoint import write_json
from erpo.inspection import find_samples, verdict_table
from erpo.records import Query, write_queries
from erpo.samples import hash_prompts
from tests.synthetic import scores_table, write_cell


def scores_file(folder):
    verdicts = {
        "amc": ["correct", "correct", "wrong", "no_answer"],
        "aime": ["wrong", "grader_error", "truncated", "gold_unparsed"],
    }
    opinions = {"amc": [1, 0, 1, -1], "aime": [0, 1, 1, 1]}
    rows = [
        {"benchmark": name, "query_id": "q", "temperature": 1.0, "sample_index": i, "verdict": verdict, "second_opinion": opinion}
        for name, kinds in verdicts.items()
        for i, (verdict, opinion) in enumerate(zip(kinds, opinions[name], strict=True))
    ]
    return write_cell(folder, scores_table(rows), "erpo", 0, 5, 4, {"amc": 1, "aime": 1}, [1.0])


def test_verdicts_and_disagreements_by_benchmark(tmp_path, capsys):
    path = scores_file(tmp_path)
    head, aime, amc, total = (line.split() for line in verdict_table([path]).splitlines())
    assert head[:3] == ["benchmark", "samples", "correct"]
    assert aime == [
        "aime",
        "4",
        "0.0%",
        "25.0%",
        "0.0%",
        "25.0%",
        "25.0%",
        "25.0%",
        "1",
        "0",
        "25.00%",
    ]  # truncated, opinion: right
    assert amc == ["amc", "4", "50.0%", "25.0%", "25.0%", "0.0%", "0.0%", "0.0%", "1", "1", "50.00%"]
    assert total == ["all", "8", "25.0%", "25.0%", "12.5%", "12.5%", "12.5%", "12.5%", "2", "1", "37.50%"]
    assert main(["verdicts", str(tmp_path / "scores")]) == 0  # a folder of scores
    assert capsys.readouterr().out.splitlines() == verdict_table([path]).splitlines()
    with pytest.raises(ValueError, match="no scores there"):
        verdict_table([tmp_path / "nothing"][:0])


def test_samples_are_found_from_where_they_lie(tmp_path):
    queries = [Query("q", "Say 1.", "1", (5, 6), 1, "amc", ())]
    for model, rows in (("other", [Query("q", "Say 1.", "1", (7,), 1, "amc", ())]), ("tiny", queries)):
        (tmp_path / f"data/{model}/benchmarks").mkdir(parents=True)
        write_queries(tmp_path / f"data/{model}/benchmarks/amc.parquet", rows)
    folder = tmp_path / "samples/erpo/seed0/step5"
    folder.mkdir(parents=True)
    for shard in ("upto1.0", "upto1.5"):
        write_json(folder / f"{shard}.json", {"prompts": {"amc": hash_prompts(queries)}})
    expected = {
        "markers": [folder / "upto1.0.json", folder / "upto1.5.json"],
        "benchmarks": {"amc": tmp_path / "data/tiny/benchmarks/amc.parquet"},  # the one with these prompts
        "store": tmp_path / "store",
    }
    assert find_samples(folder) == find_samples(tmp_path / "scores/erpo/seed0/step5.parquet") == expected
    elsewhere = find_samples(folder, (), [tmp_path / "b/amc.parquet"], tmp_path / "s")
    assert elsewhere == {**expected, "benchmarks": {"amc": tmp_path / "b/amc.parquet"}, "store": tmp_path / "s"}
    given = find_samples(None, [folder / "upto1.0.json"], [tmp_path / "b/amc.parquet"], tmp_path / "s")
    assert given == {
        "markers": [folder / "upto1.0.json"],
        "benchmarks": {"amc": tmp_path / "b/amc.parquet"},
        "store": tmp_path / "s",
    }


def test_what_is_not_there_is_named(tmp_path, capsys):
    folder = tmp_path / "samples/erpo/seed0/step5"
    folder.mkdir(parents=True)
    assert main(["inspect", str(folder)]) == 2
    assert "no samples at" in capsys.readouterr().err
    assert main(["inspect"]) == 2
    assert "give the folder of the samples" in capsys.readouterr().err
    write_json(folder / "all.json", {"prompts": {"amc": "0"}})
    assert main(["inspect", str(folder)]) == 2
    assert "no benchmark amc with the prompts of these samples" in capsys.readouterr().err


def test_a_place_that_holds_no_samples_is_one_sentence(tmp_path, capsys):
    place = tmp_path / "step5.parquet"
    for arguments, sentence in [
        (["inspect", "/"], "no samples at /"),
        (["inspect", str(place)], f"{place} does not lie where a study keeps its scores"),
        (["regrade", "--scores", str(place)], f"{place} does not lie where a study keeps its scores"),
        (["inspect", "--markers", "m.json", "--store", str(tmp_path)], "all of --markers, --benchmarks, --store"),
    ]:
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err


def test_files_that_are_no_scores_are_named(tmp_path, capsys):
    table = pq.read_table(scores_file(tmp_path))
    verdict = table.schema.get_field_index("verdict")
    spoilt = {
        "holds no scores: it lacks the columns verdict;": table.drop(["verdict"]),
        "holds unknown verdicts (perhaps);": table.set_column(verdict, "verdict", pa.array(["perhaps"] * len(table))),
        "it lacks their provenance": table.replace_schema_metadata(),
    }
    for sentence, content in spoilt.items():
        pq.write_table(content, tmp_path / "spoilt.parquet")
        assert main(["verdicts", str(tmp_path / "spoilt.parquet")]) == 2
        assert sentence in capsys.readouterr().err
