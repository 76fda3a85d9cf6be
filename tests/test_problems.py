"""The problem generator: right answers, disjoint splits, closed vocabulary, a noisy annotator that errs as documented."""

import re
from collections import Counter
from itertools import combinations, pairwise

import pytest

from erpo.config import SyntheticData
from erpo.data.problems import FAMILIES, LARGEST, SPLIT_SHARES, Problem, generate, vocabulary
from erpo.grading.answers import extract_answer, has_format
from erpo.templates import build_tokenizer, decode, render_prompt

ALL = tuple(FAMILIES)
STEP = re.compile(r"(\d+) (\+|-|\*|/|mod) (\d+) = (\d+)\.")


def data(size: int, families: tuple[str, ...] = ALL, seed: int = 0, levels: tuple[int, ...] = (1, 2, 3, 4, 5)) -> SyntheticData:
    return SyntheticData(kind="synthetic", families=families, levels=levels, size=size, seed=seed)


def calculate(left: int, op: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1), "mod": left % max(right, 1)}[op]


# --- answers, checked by solving the text in another way -----------------------------------------------------------------


def run_chain(text: str, value: int) -> int:
    words = {"add": 1, "plus": 1, "finds": 1, "buys": 1, "wins": 1}
    words |= {"subtract": -1, "minus": -1, "loses": -1, "sells": -1, "gives away": -1}
    for verb, number in re.findall(
        r"(add|plus|finds|buys|wins|subtract|minus|loses|sells|gives away|times|multiply by|doubles|triples) (\d+|them)", text
    ):
        if verb in words:
            value += words[verb] * int(number)
        else:
            value *= {"doubles": 2, "triples": 3}.get(verb) or int(number)
    return value


def roots(text: str) -> list[int]:
    equation = re.search(r"[\d(xynt][^.,?]*=[^.,?]*", text.replace("Find ", ""))[0]
    equation = re.sub(r"^\w if ", "", equation)
    letter = re.search(r"[xynt]", equation)[0]
    python = re.sub(r"(\d) (?=[(xynt])", r"\1 * ", equation).replace("=", "==")
    code = compile(python, "equation", "eval")
    return [value for value in range(LARGEST + 1) if eval(code, {letter: value})]


def continue_sequence(text: str) -> int:
    terms = [int(number) for number in re.findall(r"\d+", text)]
    gaps = [b - a for a, b in pairwise(terms)]
    growth = gaps[1] - gaps[0]
    assert all(b - a == growth for a, b in pairwise(gaps))
    for _ in range(2 if "econd" in text else 1):
        gaps.append(gaps[-1] + growth)
        terms.append(terms[-1] + gaps[-1])
    return terms[-1]


def solve(problem: Problem) -> int:
    text = problem.problem
    if problem.family in ("chain", "story"):
        return run_chain(text, int(re.search(r"\d+", text)[0]))
    if problem.family == "linear":
        (root,) = roots(text)
        return root
    if problem.family == "modular":
        expression, modulus = re.search(r"(?:Find|is|of) (.+) (?:mod|divided by) (\d+)", text).groups()
        return eval(expression) % int(modulus)
    if problem.family == "sequence":
        return continue_sequence(text)
    equation, chain = text.split(". Take ")
    (root,) = roots(equation.removeprefix("Solve "))
    return run_chain(chain, root)


@pytest.mark.parametrize("family", ALL)
def test_answers_are_right(family: str):
    for split in SPLIT_SHARES:
        for problem in generate(data(120, (family,), seed=3), split):
            assert solve(problem) == int(problem.answer), problem


def test_solutions_are_sound_and_end_in_the_answer():
    for problem in generate(data(1500), "train"):
        steps = STEP.findall(problem.solution)
        assert all(calculate(int(a), op, int(b)) == int(result) for a, op, b, result in steps), problem
        assert has_format(problem.solution)
        assert extract_answer(problem.solution).answer == problem.answer == steps[-1][3]
        numbers = [int(number) for number in re.findall(r"\d+", problem.problem + problem.solution)]
        assert max(numbers) <= LARGEST


def test_higher_levels_take_more_steps():
    problems = generate(data(3000, ("chain", "story", "linear", "modular", "combined")), "train")
    for family in ("chain", "story", "linear", "modular", "combined"):
        means = []
        for level in range(1, 6):
            counts = [len(STEP.findall(p.solution)) for p in problems if p.family == family and p.level == level]
            means.append(sum(counts) / len(counts))
        assert means == sorted(means), family
        assert means[-1] >= means[0] + 3, family


# --- sets ----------------------------------------------------------------------------------------------------------------


def test_splits_are_disjoint_for_all_seeds_in_text_and_in_arithmetic():
    texts: dict[str, set[str]] = {split: set() for split in SPLIT_SHARES}
    sums: dict[str, set[str]] = {split: set() for split in SPLIT_SHARES}
    for split in SPLIT_SHARES:
        for seed in range(6):
            found = generate(data(900, seed=seed), split)
            texts[split] |= {problem.problem for problem in found}
            sums[split] |= {problem.solution for problem in found}
    for one, other in combinations(SPLIT_SHARES, 2):
        assert not texts[one] & texts[other]
        assert not sums[one] & sums[other]
    assert all(len(found) > 3500 for found in texts.values())


def test_the_same_text_always_has_the_same_solution():
    solutions: dict[str, str] = {}
    for seed in range(4):
        for problem in generate(data(1200, seed=seed), "train"):
            assert solutions.setdefault(problem.problem, problem.solution) == problem.solution


def test_a_set_has_no_repeats_and_equal_shares():
    problems = generate(data(1215), "train")
    assert len({problem.problem for problem in problems}) == len(problems) == 1215
    cells = Counter((problem.family, problem.level) for problem in problems)
    assert len(cells) == 30
    assert set(cells.values()) == {40, 41}


def test_a_seed_decides_a_set_and_another_seed_gives_another():
    assert generate(data(90), "test") == generate(data(90), "test")
    assert generate(data(90), "test") != generate(data(90, seed=1), "test")


def test_a_larger_set_contains_the_smaller_one_of_the_same_shares():
    small, large = generate(data(60), "train"), generate(data(300), "train")
    assert {problem.problem for problem in small} <= {problem.problem for problem in large}


def test_only_asked_families_and_levels_occur():
    problems = generate(data(64, ("sequence", "linear"), levels=(2, 4)), "test")
    assert {(problem.family, problem.level) for problem in problems} == {(f, lv) for f in ("sequence", "linear") for lv in (2, 4)}


# --- vocabulary ----------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_closed_small_and_used_up():
    tokenizer = build_tokenizer(vocabulary())
    used: set[str] = set()
    for seed, noise in ((0, 0.0), (1, 0.3)):
        for problem in generate(data(1500, seed=seed), "warm", noise=noise):
            for text in (problem.problem, problem.solution):
                ids = tokenizer(text)["input_ids"]
                assert tokenizer.unk_token_id not in ids, text
                assert decode(tokenizer, ids) == text
                used.update(tokenizer.convert_ids_to_tokens(ids))
    assert used == set(vocabulary())
    assert len(vocabulary()) < 200
    assert len(vocabulary()) == len(set(vocabulary()))


def test_prompts_are_short():
    tokenizer = build_tokenizer(vocabulary())
    lengths = [len(render_prompt(tokenizer, problem.problem, "")) for problem in generate(data(2000), "train")]
    assert max(lengths) <= 34
    assert 12 < sum(lengths) / len(lengths) < 20


# --- the noisy annotator -------------------------------------------------------------------------------------------------


def test_the_annotator_errs_by_1_or_10_in_the_given_share_of_steps_and_goes_on_from_the_error():
    wrong = total = wrong_answers = 0
    for problem in generate(data(3000, ("chain",)), "warm", noise=0.2):
        steps = [(int(a), op, int(b), int(result)) for a, op, b, result in STEP.findall(problem.solution)]
        for before, after in pairwise(steps):
            assert after[0] == before[3]
        for a, op, b, result in steps:
            assert 0 <= result <= LARGEST
            true = min(max(calculate(a, op, b), 0), LARGEST)
            assert abs(result - true) in (0, 1, 10)
            wrong += result != true
            total += 1
        assert extract_answer(problem.solution).answer == str(steps[-1][3])
        wrong_answers += extract_answer(problem.solution).answer != problem.answer
    assert total == 12_000
    assert abs(wrong / total - 0.2) < 3 * (0.2 * 0.8 / total) ** 0.5
    assert wrong_answers > 1000


def test_noise_changes_solutions_only():
    clean, noisy = generate(data(600), "warm"), generate(data(600), "warm", noise=0.5)
    assert [(p.problem, p.answer, p.level, p.family) for p in clean] == [(p.problem, p.answer, p.level, p.family) for p in noisy]
    assert sum(a.solution != b.solution for a, b in zip(clean, noisy, strict=True)) > 300


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "split", "sentence"),
    [
        (data(10, ("chain", "geometry")), "train", r"families: \['geometry'\] not among the problem families chain, story"),
        (data(10, ()), "train", "families: none given"),
        (data(10, levels=(0, 1)), "train", r"levels: \[0, 1\] must be one or more of 1 to 5"),
        (data(10), "validation", "split: 'validation' must be one of warm, train, test"),
        (
            data(5000, ("modular",), levels=(1,)),
            "test",
            r"family 'modular' at level 1, but split 'test' has only about \d+; ask for fewer",
        ),
    ],
)
def test_refusals_are_one_sentence(entry: SyntheticData, split: str, sentence: str):
    with pytest.raises(ValueError, match=sentence) as caught:
        generate(entry, split)
    assert "\n" not in str(caught.value)
