"""Problem files become queries: levels, labels, repeats, overlap, length, token counts; nothing is dropped without a line."""

import functools
import hashlib
import http.server
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erpo.config import PROMPT_SUFFIX, FileData, SyntheticData
from erpo.data.overlap import layout_key, near, same, windows
from erpo.data.problems import generate, vocabulary
from erpo.data.queries import prepare_benchmark, prepare_queries
from erpo.data.rawdata import accepted_answers, locate, parse_level, read_problems
from erpo.records import Query, read_queries
from erpo.templates import build_tokenizer

BENCHMARKS = {
    "aime24": ("eval_aime_2024", "aime_2024", 30),
    "aime25": ("eval_aime_2025", "aime_2025", 30),
    "amc": ("eval_amc", "amc", 83),
    "math500": ("eval_math500", "math", 500),
    "minerva": ("eval_minerva", "minerva", 272),
    "olympiadbench": ("eval_olympiad_bench", "olympiad_bench", 675),
}
TRAIN = ("train_math_lvl3to5_8k", "math_lvl3to5_8k", 8523)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the real files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(data_dir: Path, qwen_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The training set and all six benchmarks, prepared as the paper study does, with the manifests."""
    out = tmp_path_factory.mktemp("real")
    common = {"tokenizer_dir": qwen_tokenizer_dir, "prompt_suffix": PROMPT_SUFFIX, "data_dir": data_dir}
    for name, (file, _, _) in BENCHMARKS.items():
        entry = FileData(kind="file", file=f"{file}.jsonl")
        prepare_benchmark(entry, **common, out=out / f"{name}.parquet", manifest=out / f"{name}.json")
    prepare_queries(
        FileData(kind="file", file=f"{TRAIN[0]}.jsonl", levels=(3, 4, 5)),
        **common,
        max_query_tokens=1024,
        benchmarks={name: out / f"{name}.parquet" for name in BENCHMARKS},
        out=out / "train.parquet",
        manifest=out / "train.json",
    )
    names = [*BENCHMARKS, "train"]
    return SimpleNamespace(
        queries={name: read_queries(out / f"{name}.parquet") for name in names},
        manifests={name: json.loads((out / f"{name}.json").read_text()) for name in names},
    )


def test_8523_rows_are_read_and_every_one_that_is_missing_is_listed(real: SimpleNamespace, data_dir: Path):
    manifest = real.manifests["train"]
    assert manifest["rows_read"] == 8523
    assert manifest["input"]["sha256"] == sha256(data_dir / f"{TRAIN[0]}.jsonl")
    assert manifest["account"] == "8,523 rows read - 6 in a benchmark - 8 too long = 8,509 queries"
    assert "as many as the published MATH level 3-5 set" in manifest["reference"]
    long = [drop["row"] for drop in manifest["drops"] if drop["reason"] == "too long"]
    assert long == [750, 1270, 1564, 2139, 2244, 2905, 5867, 8131]
    overlapping = [drop["row"] for drop in manifest["drops"] if drop["reason"] == "in a benchmark"]
    assert overlapping == [1473, 2847, 3327, 3338, 5922, 8005]
    source = rows_of(data_dir / f"{TRAIN[0]}.jsonl")
    expected = [row["id"] for index, row in enumerate(source) if index not in {*long, *overlapping}]
    assert [query.query_id for query in real.queries["train"]] == expected


def test_levels_add_up(real: SimpleNamespace):
    levels = real.manifests["train"]["levels"]
    assert levels["read"] == {"3": 2514, "4": 2648, "5": 3361}
    assert levels["too long"] == {"5": 8}
    assert levels["in a benchmark"] == {"4": 3, "5": 3}
    assert levels["queries"] == {"3": 2514, "4": 2645, "5": 3350}
    assert Counter(str(query.level) for query in real.queries["train"]) == levels["queries"]


def test_token_counts_are_the_known_ones(real: SimpleNamespace):
    tokens = real.manifests["train"]["tokens"]
    known = {
        "problem": (79.6, 53, 238, 1654, 67),
        "with_instruction": (123.6, 97, 282, 1698, 80),
        "prompt": (131.6, 105, 290, 1706, 82),
    }
    for text, (mean, median, p95, longest, over_512) in known.items():
        found = tokens[text]
        assert (round(found["mean"], 1), found["median"], found["p95"], found["max"], found["over_512"]) == (
            mean,
            median,
            p95,
            longest,
            over_512,
        )
    assert max(len(query.prompt_ids) for query in real.queries["train"]) <= 1024


def test_the_five_bad_labels_are_listed_with_what_replaced_them(real: SimpleNamespace):
    listed = {entry["row"]: (entry["label"], entry["answer"]) for entry in real.manifests["train"]["labels"]}
    assert listed == {
        3380: ("None", "9"),
        4283: ("12", "6"),
        5054: ("", "\\text{(A)} ||| 0"),
        5158: ("", "\\text{(A)} ||| 0"),
        7997: ("None", "2"),
    }
    assert sum("corrected-label" in query.flags for query in real.queries["train"]) == 5


def test_repeated_training_problems_are_listed_and_stay(real: SimpleNamespace):
    duplicates = real.manifests["train"]["duplicates"]
    assert [[entry["row"] for entry in group] for group in duplicates["same_text"]] == [[1769, 4007]]
    assert [entry["query_id"] for entry in duplicates["same_text"][0]] == ["98fc77ec11ec6bfc", "98fc77ec11ec6bfc-2"]
    layouts = [[entry["row"] for entry in group] for group in duplicates["same_up_to_layout"]]
    assert layouts == [[3497, 4749], [4237, 4465], [5467, 7583]]
    ids = [query.query_id for query in real.queries["train"]]
    assert len(ids) == len(set(ids))


def test_overlap_is_reported_per_benchmark(real: SimpleNamespace):
    overlap = real.manifests["train"]["overlap"]
    assert {name: len(report["same"]) for name, report in overlap.items()} == {
        "aime24": 0,
        "aime25": 0,
        "amc": 0,
        "math500": 0,
        "minerva": 0,
        "olympiadbench": 6,
    }
    same_rows = [(pair["row"], pair["benchmark_row"]) for pair in overlap["olympiadbench"]["same"]]
    assert same_rows == [(1473, 459), (2847, 395), (3327, 522), (3338, 544), (5922, 517), (8005, 346)]
    assert all(pair["same_answer"] for pair in overlap["olympiadbench"]["same"])
    reworded = {
        (pair["row"], pair["benchmark_row"]) for report in overlap.values() for pair in report["near"] if pair["same_answer"]
    }
    assert {(7725, 326), (170, 462), (645, 339), (3564, 386)} <= reworded
    kept = {query.query_id for query in real.queries["train"]}
    assert all(pair["query_id"] in kept for report in overlap.values() for pair in report["near"])


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name, (_, _, rows) in BENCHMARKS.items()])
def test_benchmarks_keep_every_row_in_order(real: SimpleNamespace, data_dir: Path, name: str, rows: int):
    source = rows_of(data_dir / f"{BENCHMARKS[name][0]}.jsonl")
    assert [query.query_id for query in real.queries[name]] == [row["id"] for row in source]
    assert len(real.queries[name]) == rows == real.manifests[name]["queries"]
    assert real.manifests[name]["dropped"] == {}


def test_oddities_of_the_benchmarks_are_flags(real: SimpleNamespace):
    flags = {name: dict(real.manifests[name]["flags"]) for name in BENCHMARKS}
    assert flags["aime24"] == {"corrupted-text": 1}
    assert flags["aime25"] == flags["amc"] == {}
    assert flags["math500"] == {"in-math-train": 2}
    assert flags["minerva"] == {"corrected-label": 34, "accepted-alternatives": 19, "disputed-label": 6, "doubtful-label": 2}
    assert flags["olympiadbench"] == {"several-values": 94, "in-math-train": 8, "unit-apart": 8, "tolerance": 1}
    assert "corrupted-text" in real.queries["aime24"][28].flags
    assert [entry["row"] for entry in real.manifests["math500"]["flagged"]] == [339, 386]


def test_answers_are_the_prepared_ones_and_their_alternatives(real: SimpleNamespace, data_dir: Path):
    for name, (file, _, _) in BENCHMARKS.items():
        for row, query in zip(rows_of(data_dir / f"{file}.jsonl"), real.queries[name], strict=True):
            first, *others = query.answer.split(" ||| ")
            if row.get("error"):
                assert (first, others) == ("4.2 \\tolerance{0.1}", ["4.2\\% \\tolerance{0.001}"])
                continue
            assert first == row["answer"]
            assert set(others) <= {*row.get("answers", []), "0.264"}
    assert real.queries["minerva"][10].answer == "0.01 ||| 0.02"
    assert real.queries["minerva"][25].answer == "41.8^\\circ"


@pytest.mark.parametrize("name", ["train", *BENCHMARKS])
def test_the_published_layout_gives_the_same_problems_and_answers(data_dir: Path, tmp_path: Path, name: str):
    file, source, _ = TRAIN if name == "train" else BENCHMARKS[name]
    rows = rows_of(data_dir / f"{file}.jsonl")
    published = [
        {
            "id": "0" * 64,
            "source": source,
            "difficulty": 1.0,
            "prompt": row["problem"] + PROMPT_SUFFIX,
            "messages": "[]",
            "ground_truth": row["reference_answer"],
            "original_level": str(row.get("level") or row.get("difficulty") or ""),
        }
        for row in rows
    ]
    theirs = read_problems(write_rows(tmp_path / "published.jsonl", published), PROMPT_SUFFIX)
    ours = read_problems(data_dir / f"{file}.jsonl", PROMPT_SUFFIX)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.query_id, a.problem, a.answer, a.level, a.label, set(a.flags)) == (
            b.query_id,
            b.problem,
            b.answer,
            b.level,
            b.label,
            set(b.flags),
        )


# --- small files ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    signs = " ".join(chr(code) for code in range(33, 127))
    build_tokenizer([*vocabulary(), signs, *(chr(c) for c in range(65, 123)), *WORDS]).save_pretrained(folder)
    return folder


WORDS = ("What is dfrac tfrac frac left right boxed text Find the value of apples buys Simplify quad cdot second half answer",)


def prepare(
    rows: list[dict[str, Any]],
    folder: Path,
    tokenizer: Path,
    levels: tuple[int, ...] | None = None,
    limit: int = 64,
    **benchmarks: Path,
) -> tuple[list[Query], dict[str, Any]]:
    write_rows(folder / "rows.jsonl", rows)
    prepare_queries(
        FileData(kind="file", file="rows.jsonl", sha256=sha256(folder / "rows.jsonl"), levels=levels),
        tokenizer_dir=tokenizer,
        prompt_suffix="",
        max_query_tokens=limit,
        data_dir=folder,
        benchmarks=benchmarks,
        out=folder / "queries.parquet",
        manifest=folder / "manifest.json",
    )
    return read_queries(folder / "queries.parquet"), json.loads((folder / "manifest.json").read_text())


def evaluate(rows: list[dict[str, Any]], folder: Path, tokenizer: Path, name: str = "bench") -> tuple[list[Query], dict[str, Any]]:
    write_rows(folder / f"{name}.jsonl", rows)
    prepare_benchmark(
        FileData(kind="file", file=f"{name}.jsonl"),
        tokenizer_dir=tokenizer,
        prompt_suffix="",
        data_dir=folder,
        out=folder / f"{name}.parquet",
        manifest=folder / f"{name}.manifest.json",
    )
    return read_queries(folder / f"{name}.parquet"), json.loads((folder / f"{name}.manifest.json").read_text())


def test_odd_levels_a_repeat_a_nested_box_and_a_leak(tmp_path: Path, toy_tokenizer: Path):
    """R13: the levels asked for are kept, every drop has a reason, the leak is found through layout and listed."""
    evaluate([{"problem": "What is $\\frac{1}{2} + \\frac{1}{3}$?", "answer": "\\frac56"}], tmp_path, toy_tokenizer)
    rows = [
        {"problem": "What is 1?", "answer": "1", "level": "Level 3"},
        {"problem": "What is 2?", "answer": "2", "level": "Level 5"},
        {"problem": "What is 3?", "answer": "3", "level": "Level ?"},
        {"problem": "What is 4?", "answer": "4", "level": "4"},
        {"problem": "What is 5?", "answer": "5", "level": None},
        {"problem": "What is 6?", "answer": "6", "level": "Level 2"},
        {"problem": "What is 7?", "answer": "7", "level": 3},
        {"problem": "What is 1?", "answer": "1", "level": "Level 3"},
        {"problem": "What is 8?", "solution": "so \\boxed{1}, then \\boxed{\\frac{8}{\\sqrt{4}}}.", "level": "Level 4"},
        {"problem": "What is \n$\\dfrac{1}{2}+\\dfrac{1}{3}$ ?", "answer": "\\frac56", "level": "Level 4"},
        {"problem": "What is 9?", "answer": "9", "level": 5.0},
        {"problem": "What is 10?", "answer": "10", "level": "level 5"},
    ]
    queries, manifest = prepare(rows, tmp_path, toy_tokenizer, (3, 4, 5), bench=tmp_path / "bench.parquet")
    assert [(query.problem, query.answer, query.level) for query in queries] == [
        ("What is 1?", "1", 3),
        ("What is 2?", "2", 5),
        ("What is 4?", "4", 4),
        ("What is 7?", "7", 3),
        ("What is 1?", "1", 3),
        ("What is 8?", "\\frac{8}{\\sqrt{4}}", 4),
        ("What is 9?", "9", 5),
        ("What is 10?", "10", 5),
    ]
    assert queries[4].query_id == queries[0].query_id + "-2"
    assert [(drop["row"], drop["reason"]) for drop in manifest["drops"]] == [
        (2, "level not asked for"),
        (4, "level not asked for"),
        (5, "level not asked for"),
        (9, "in a benchmark"),
    ]
    assert manifest["levels"]["level not asked for"] == {"2": 1, "Level ?": 1, "none": 1}
    assert manifest["levels"]["queries"] == {"3": 3, "4": 2, "5": 3}
    assert manifest["levels"]["in a benchmark"] == {"4": 1}
    assert [pair["row"] for pair in manifest["overlap"]["bench"]["same"]] == [9]
    assert [[entry["row"] for entry in group] for group in manifest["duplicates"]["same_text"]] == [[0, 7]]
    assert manifest["account"] == "12 rows read - 3 level not asked for - 1 in a benchmark = 8 queries"
    assert manifest["reference"] == "12 rows where the published MATH level 3-5 set has 8,523 (-8,511); another set"


UNUSABLE = ["", "\\frac{", "\\text{see figure}", "None", None]


def test_unusable_labels_are_left_out_of_training_and_flagged_in_a_benchmark(tmp_path: Path, toy_tokenizer: Path):
    """R05: a gold that nothing can be graded against never becomes a reward."""
    rows = [{"problem": f"What is {index}?", "answer": answer} for index, answer in enumerate([*UNUSABLE, "5"])]
    queries, manifest = prepare(rows, tmp_path, toy_tokenizer)
    assert [query.answer for query in queries] == ["5"]
    assert [(drop["row"], drop["reason"]) for drop in manifest["drops"]] == [(row, "unusable label") for row in range(5)]
    assert len(manifest["labels"]) == 5
    benchmark, report = evaluate(rows, tmp_path, toy_tokenizer)
    assert [("gold-unparsed" in query.flags) for query in benchmark] == [True] * 5 + [False]
    assert report["flags"] == {"gold-unparsed": 5}
    assert report["queries"] == 6


def test_long_queries_are_left_out_and_the_limit_itself_is_not_long(tmp_path: Path, toy_tokenizer: Path):
    rows = [{"problem": "What is 1?", "answer": "1"}, {"problem": "What is the value of 1?", "answer": "1"}]
    queries, manifest = prepare(rows, tmp_path, toy_tokenizer, limit=6)
    assert [len(query.prompt_ids) for query in queries] == [6]
    assert manifest["drops"][0]["detail"] == "9 tokens, limit 6"
    assert manifest["tokens"]["prompt"] == {"mean": 7.5, "median": 7.5, "p95": 8.85, "p99": 8.97, "max": 9, "over_512": 0}


def test_no_query_left_is_refused(tmp_path: Path, toy_tokenizer: Path):
    with pytest.raises(ValueError, match=r"no query is left of 1 rows \(1 rows read - 1 level not asked for = 0 queries\)"):
        prepare([{"problem": "What is 1?", "answer": "1", "level": 1}], tmp_path, toy_tokenizer, levels=(3,))


def test_levels_on_a_benchmark_are_refused(tmp_path: Path, toy_tokenizer: Path):
    with pytest.raises(ValueError, match="a benchmark is evaluated whole"):
        prepare_benchmark(
            FileData(kind="file", file="x.jsonl", levels=(3,)),
            tokenizer_dir=toy_tokenizer,
            prompt_suffix="",
            data_dir=tmp_path,
            out=tmp_path / "o",
            manifest=tmp_path / "m",
        )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{not json", "line 2 is not JSON"),
        ("[1, 2]", "line 2 is a list; a problem file has one JSON object per line"),
        ('{"answer": "1"}', "line 2 has no problem text; one of the fields problem, question, prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, sentence: str):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "What is 1?", "answer": "1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=sentence):
        read_problems(path, "")


def test_synthetic_sets_become_queries(tmp_path: Path, toy_tokenizer: Path):
    common: dict[str, Any] = {"tokenizer_dir": toy_tokenizer, "prompt_suffix": "", "data_dir": tmp_path}
    entry = SyntheticData(kind="synthetic", families=("chain", "linear"), size=40)
    prepare_benchmark(entry, **common, out=tmp_path / "b.parquet", manifest=tmp_path / "b.json")
    prepare_queries(
        entry,
        **common,
        max_query_tokens=64,
        benchmarks={"same-families": tmp_path / "b.parquet"},
        out=tmp_path / "t.parquet",
        manifest=tmp_path / "t.json",
    )
    queries = read_queries(tmp_path / "t.parquet")
    assert [(q.problem, q.answer, q.level) for q in queries] == [(p.problem, p.answer, p.level) for p in generate(entry, "train")]
    assert {query.source for query in queries} == {"synthetic/chain", "synthetic/linear"}
    assert json.loads((tmp_path / "t.json").read_text())["overlap"]["same-families"]["same"] == []
    benchmark = read_queries(tmp_path / "b.parquet")
    assert [query.problem for query in benchmark] == [problem.problem for problem in generate(entry, "test")]
    assert all(not query.flags for query in benchmark)


# --- levels, labels, layout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Level 3", 3),
        ("3", 3),
        ("3.0", 3),
        ("level 5", 5),
        ("Level ?", None),
        ("", None),
        ("hard", None),
        ("3.5", None),
        ("Level 3-5", None),
    ],
)
def test_levels_are_read(text: str, level: int | None):
    assert parse_level(text) == level


@pytest.mark.parametrize(
    ("label", "source", "answers"),
    [
        ("025", "aime_2024", ["25"]),
        ("000", "aime_2024", ["0"]),
        ("336^\\circ", "aime_2025", ["336"]),
        ("142.0", "amc", ["142"]),
        ("-4.0", "amc", ["-4"]),
        ("025", "math", ["025"]),
        ("['9.6\\n']", "minerva", ["9.6"]),
        ("['0.01\\n', '0.02\\n']", "minerva", ["0.01", "0.02"]),
        ("['s^{2}+b s+1\\n', 's^2 + bs + 1']", "minerva", ["s^{2}+b s+1"]),
        ("['$\\\\frac{41}{12}$']", "olympiad_bench", ["\\frac{41}{12}"]),
        ("['$69$,$84$']", "olympiad_bench", ["$69$,$84$"]),
        ("[0,1]", "math", ["[0,1]"]),
        ("[-2,7]", "olympiad_bench", ["[-2,7]"]),
        ("", "math", []),
    ],
)
def test_published_labels_are_read(label: str, source: str, answers: list[str]):
    assert accepted_answers(label, source) == answers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $\\dfrac{1}{2}$.", "Find\n\\[\\frac 1 2.\\]"),
        ("$x,y$ are  real.  Find $x+y.$", "$x$, $y$ are real. Find $x + y$."),
        ("$\\left( 3, \\frac{\\pi}{2} \\right)$", "$(3,\\tfrac\\pi2)$"),
        ("$\\quad$ Let $a\\le b$ and \\text { so }", "let $a \\leq b$ and \\text{so}"),
        ("$1,2,\\dots,9$", "$1, 2, \\ldots, 9$"),
    ],
)
def test_layout_does_not_tell_problems_apart(one: str, other: str):
    assert layout_key(one) == layout_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find 1.5.", "Find 15."),
        ("Find $x^2$.", "Find $x_2$."),
        ("$a\\leq b$", "$a\\geq b$"),
        ("$x-1$", "$x+1$"),
        ("$x>1$", "$x<1$"),
    ],
)
def test_different_problems_stay_different(one: str, other: str):
    assert layout_key(one) != layout_key(other)


def test_windows_and_near_by_hand():
    base = "a b c d e f g h i j"  # ten words: three windows of eight
    assert len(windows(base)) == 3
    assert len(windows("a b c")) == 1
    assert windows("") == set()
    texts = [base, "z b c d e f g h i j", "a b c d e f g h z z z z", "p q r s t u v w"]
    found = near([windows(text) for text in texts], [windows(base)])
    assert [(pair.text, pair.shared, pair.share) for pair in found] == [(0, 3, 1.0), (1, 2, 0.667)]
    assert same(["k", "m", "k"], ["m", "k"]) == [(0, 1), (1, 0), (2, 1)]


# --- finding and fetching files ------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path):
    """A local file server: its folder and its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield SimpleNamespace(folder=folder, url=f"http://127.0.0.1:{running.server_address[1]}")
        running.shutdown()
        thread.join()


def test_a_missing_file_is_downloaded_once_and_checked(server: SimpleNamespace, tmp_path: Path):
    served = write_rows(server.folder / "remote.jsonl", [{"problem": "What is 1?", "answer": "1"}])
    entry = FileData(kind="file", file="sub/local.jsonl", url=f"{server.url}/remote.jsonl", sha256=sha256(served))
    path = locate(entry, tmp_path / "data")
    assert path == tmp_path / "data" / "sub" / "local.jsonl"
    assert path.read_bytes() == served.read_bytes()
    served.unlink()
    assert locate(entry, tmp_path / "data") == path
    assert [file.name for file in path.parent.iterdir()] == ["local.jsonl"]


def test_a_url_may_pin_a_checksum_of_its_own(server: SimpleNamespace, tmp_path: Path):
    served = write_rows(server.folder / "remote.jsonl", [{"prompt": "What is 1?", "ground_truth": "1"}])
    entry = FileData(kind="file", file="rows.jsonl", url=f"{server.url}/remote.jsonl#sha256={sha256(served)}", sha256="0" * 64)
    assert locate(entry, tmp_path).read_bytes() == served.read_bytes()
    assert locate(entry, tmp_path).is_file()


def test_a_wrong_download_is_refused_and_leaves_nothing(server: SimpleNamespace, tmp_path: Path):
    write_rows(server.folder / "remote.jsonl", [{"problem": "What is 1?", "answer": "1"}])
    entry = FileData(kind="file", file="rows.jsonl", url=f"{server.url}/remote.jsonl", sha256="0" * 64)
    with pytest.raises(ValueError, match=r"gives a file with sha256 [0-9a-f]{64}, expected 0{64}; nothing was kept"):
        locate(entry, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("address", ["/absent.jsonl", None])
def test_a_failed_download_names_the_alternative(server: SimpleNamespace, tmp_path: Path, address: str | None):
    url = server.url + address if address else "http://127.0.0.1:9/unreachable.jsonl"
    with pytest.raises(ValueError, match=r"could not download http.*without a network put it there, or set ERPO_DATA") as caught:
        locate(FileData(kind="file", file="rows.jsonl", url=url), tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.glob("*.part")) == []


def test_a_changed_local_file_is_refused(tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", [{"problem": "What is 1?", "answer": "1"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl has sha256 .*, expected f{64}: it is not the file this study was made for"):
        locate(FileData(kind="file", file="rows.jsonl", sha256="f" * 64), tmp_path)


def test_a_missing_file_without_url_is_one_sentence(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"no data file .*rows\.jsonl: put it there, or set ERPO_DATA to the folder that holds rows\.jsonl"
    ):
        locate(FileData(kind="file", file="rows.jsonl"), tmp_path)
