import csv
import json

import pytest
from datasets import Dataset, DatasetDict
from datasets.arrow_writer import ArrowWriter

from openrl.config.groups.model import LoadFlags
from openrl.data.loading import load_rows, load_sources
from openrl.data.reading import Chunk, read_rows
from openrl.data.tokenizer import leading_ids, load_tokenizer, require_chat_template
from openrl.errors import UserError
from tests.tiny import BOS, EOS, tiny_tokenizer

ROWS = [{"input": "1 2 -> 3:", "label": 3}, {"input": "2 2 -> 4:", "label": 4}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(source, split="train", max_samples=None):
    return load_rows(str(source), split, max_samples, flag="prompt_data")


def save_arrow(rows, path):
    with ArrowWriter(path=str(path), features=rows.features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_every_file_format_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    rows = Dataset.from_list(ROWS)
    write = {
        "json": rows.to_json,
        "jsonl": rows.to_json,
        "csv": rows.to_csv,
        "parquet": rows.to_parquet,
    }
    write.get(suffix, lambda path: save_arrow(rows, path))(path)
    # the cells of a CSV file are text
    expected = [row | {"label": str(row["label"])} for row in ROWS] if suffix == "csv" else ROWS
    assert list(load(path)) == expected
    assert list(load(path, max_samples=1)) == expected[:1]


CELLS = ["007", "0.50", "1e5", "True", "None", "NA", "nan", "1,000", " x ", "", "x\ny"]


def test_cells_of_csv_are_the_text_of_the_file(tmp_path):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["input", "label"], *(["a", cell] for cell in CELLS)])
    for wanted in (None, len(CELLS)):
        assert [row["label"] for row in load(path, max_samples=wanted)] == CELLS


LABELS = [1, 2.5, "007", True, 12345678901234567890123, -0.0, 1e300, "2024-01-01", None, [1, "x"]]


@pytest.mark.parametrize("form", ["lines", "list", "pretty list", "columns"])
def test_values_of_json_are_those_of_the_file(tmp_path, form):
    """Numbers of 23 digits, labels of several kinds and texts that look like dates stay as they
    are; objects get no keys that only others have."""
    rows = [
        {"input": [{"role": "user", "content": "x"}], "label": label, "more": {str(n): None}}
        for n, label in enumerate(LABELS)
    ]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    text = {
        "lines": "".join(json.dumps(row) + "\n\n" for row in rows),
        "list": json.dumps(rows),
        "pretty list": json.dumps(rows, indent=2),
        "columns": json.dumps(columns, indent=2),
    }[form]
    path = tmp_path / "rows.json"
    path.write_text(text)
    for wanted in (None, 20):
        loaded = load(path, max_samples=wanted)
        assert repr(list(loaded)) == repr(rows)
        assert repr([loaded[i] for i in range(len(rows))]) == repr(rows)


def test_labels_of_different_types_are_kept_as_they_are(tmp_path):
    labels = [1, "x", {"numbers": [1, 2]}, {"target": 3}]
    path = jsonl(tmp_path / "rows.jsonl", [{"input": "a", "label": label} for label in labels])
    for wanted in (4, 3, None):
        assert [row["label"] for row in load(path, max_samples=wanted)] == labels[:wanted]


def test_saved_dataset_ignores_the_split_and_saved_dict_uses_it(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(
        tmp_path / "two"
    )
    assert list(load(tmp_path / "one", split="test")) == ROWS
    assert list(load(tmp_path / "two", split="test")) == ROWS[:1]
    with pytest.raises(
        UserError, match=r"--prompt_data: .* has no split 'dev'; it has train, test"
    ):
        load(tmp_path / "two", split="dev")


def test_directory_of_files_has_splits_by_file_name(tmp_path_factory):
    # "test" in a directory's name would be taken for the split
    directory = tmp_path_factory.mktemp("rows")
    jsonl(directory / "train.jsonl", ROWS)
    assert list(load(directory)) == ROWS
    with pytest.raises(UserError, match=r"--prompt_data: .*Unknown split \"dev\".*train"):
        load(directory, split="dev")


@pytest.mark.parametrize("max_samples", [None, 3])
def test_a_directory_gives_the_values_of_its_files(tmp_path_factory, max_samples):
    """Whatever the files are: lines, a list or columns; their rows may have different columns."""
    directory = tmp_path_factory.mktemp("rows")
    rows = [{"input": "x", "label": label} for label in LABELS]
    jsonl(directory / "train-0.jsonl", rows[:4])
    (directory / "train-1.json").write_text(json.dumps(rows[4:7], indent=1))
    jsonl(directory / "train-2.jsonl", [{"input": "y", "label": 1, "only": {"here": "007"}}])
    jsonl(directory / "test-0.jsonl", [{"input": "z", "label": "2024-01-01"}])
    found = list(load(directory, max_samples=max_samples))
    expected = [*rows[:7], {"input": "y", "label": 1, "only": {"here": "007"}}][:max_samples]
    assert found == expected and [type(row["label"]) for row in found] == [
        type(row["label"]) for row in expected
    ]
    assert list(load(directory, split="test")) == [{"input": "z", "label": "2024-01-01"}]
    assert len(load(directory, split="train+test")) == 9


@pytest.mark.parametrize("max_samples", [None, 2, 100])
@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_a_directory_of_tables_gives_text(tmp_path_factory, ending, separator, max_samples):
    directory = tmp_path_factory.mktemp("rows")
    tables = [["input", "label"], ["a", "007"], ["b", "None"]], [["label", "more"], ["1e5", "True"]]
    for number, table in enumerate(tables):
        lines = [separator.join(cells) + "\n" for cells in table]
        (directory / f"train-{number}.{ending}").write_text("".join(lines))
    expected = [
        {"input": "a", "label": "007", "more": None},
        {"input": "b", "label": "None", "more": None},
        {"input": None, "label": "1e5", "more": "True"},
    ]
    found = [{"more": None, **row} for row in load(directory, max_samples=max_samples)]
    assert found == expected[:max_samples]


def test_every_source_can_be_sliced(tmp_path_factory):
    rows = [{"input": str(number)} for number in range(10)]
    directory = tmp_path_factory.mktemp("rows")
    file = jsonl(directory / "train.jsonl", rows)
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    Dataset.from_list(rows).save_to_disk(one)
    DatasetDict(train=Dataset.from_list(rows)).save_to_disk(two)
    for source in (file, directory, one, two):
        assert list(load(source, split="train[:3]")) == rows[:3]
        assert list(load(source, split="train[-40%:]", max_samples=2)) == rows[6:8]
    with pytest.raises(UserError, match=r"--prompt_data: the slice \[a:\] of its split cannot be"):
        load(file, split="train[a:]")


def test_max_samples_takes_the_first_rows(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert list(load(path, max_samples=1)) == ROWS[:1]
    assert list(load(path, max_samples=100)) == ROWS


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "./rows", "missing.parquet", "a/b/c"])
def test_missing_paths_are_named_without_asking_the_hub(source):
    with pytest.raises(UserError, match=f"--prompt_data: no such file or directory: {source}"):
        load(source)


def test_empty_and_unknown_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.txt").write_text("text")
    (tmp_path / "header.csv").write_text("input,label\n")
    (tmp_path / "list.json").write_text("[]")
    expected = {
        "empty.jsonl": "is empty",
        "rows.txt": "cannot read",
        "header.csv": "no rows",
        "list.json": "no rows",
    }
    for name, message in expected.items():
        with pytest.raises(UserError, match=f"--prompt_data: .*{message}"):
            load(tmp_path / name)


def test_few_rows_are_read_without_those_behind_them(tmp_path):
    """The end of the file is no JSON: who reads on fails. JSON is read 10 MB at a time, one such
    piece ahead."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"input": "x" * 2**20}) + "\n" for _ in range(32)) + "{broken\n"
    )
    assert len(load(path, max_samples=3)) == 3
    assert bad_rows(load(path)) == [
        "32: not JSON: Expecting property name enclosed in double quotes at column 2"
    ]


@pytest.mark.parametrize("max_samples", [None, 1])
def test_a_directory_has_splits_configurations_and_data_directories(tmp_path_factory, max_samples):
    """NAME@SUBSET: a split of that name, else a configuration, else a data directory."""
    directory = tmp_path_factory.mktemp("rows")
    jsonl(directory / "train.jsonl", [{"at": "train"}])
    jsonl(directory / "dev.jsonl", [{"at": "dev"}])
    (directory / "hard").mkdir()
    jsonl(directory / "hard/train.jsonl", [{"at": "hard"}])
    (directory / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path:"
        " train.jsonl}\n  - {split: dev, path: dev.jsonl}\n- config_name: other\n  data_files:\n  -"
        " {split: train, path: dev.jsonl}\n---\n"
    )

    def at(source):
        return [row["at"] for row in load(source, max_samples=max_samples)]

    assert [at(f"{directory}@{subset}") for subset in ("dev", "train", "other")] == [
        ["dev"],
        ["train"],
        ["dev"],
    ]
    (directory / "README.md").unlink()
    assert at(f"{directory}@hard") == ["hard"]
    with pytest.raises(UserError, match=r"--prompt_data: cannot load .*nothing"):
        load(f"{directory}@nothing")


def test_a_subset_of_saved_datasets_and_of_files(tmp_path):
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(
        tmp_path / "two"
    )
    assert list(load(f"{tmp_path}/two@test")) == ROWS[:1]
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert list(load(f"{path}@train")) == ROWS
    with pytest.raises(
        UserError, match=r"--prompt_data: .*rows.jsonl is a single file, without a subset 'test'"
    ):
        load(f"{path}@test")
    # a path that exists is meant as it is
    assert list(load(jsonl(tmp_path / "a@b,c.jsonl", ROWS))) == ROWS


def test_items_of_a_comma_list_follow_each_other_and_have_names(tmp_path):
    first, second = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", ROWS[:1])
    other = tmp_path / "more"
    other.mkdir()
    again = jsonl(other / "a.jsonl", ROWS)

    def tags(*items, **kwargs):
        kwargs = {"max_samples": None, "flag": "prompt_data"} | kwargs
        return [
            (source.tag, len(source.rows))
            for source in load_sources(",".join(map(str, items)), "train", **kwargs)
        ]

    assert tags(first) == [("default", 2)]
    assert tags(first, second) == [("a", 2), ("b", 1)]
    assert tags(first, again) == [(str(first), 2), (str(again), 2)]
    assert tags(f"{first}@train", again) == [("a@train", 2), ("a", 2)]
    assert tags(first, again, max_samples=3) == [(str(first), 2), (str(again), 1)]
    assert tags(first, again, max_samples=2) == [(str(first), 2)]  # what comes after is not opened
    assert tags(first, tmp_path / "none.jsonl", max_samples=2) == [("a", 2)]
    assert tags(first, again, max_samples=1, mixed=True) == [(str(first), 1), (str(again), 1)]


def test_dataset_scripts_are_not_run(tmp_path):
    (tmp_path / "rows.py").write_text("raise SystemExit")
    with pytest.raises(
        UserError, match=r"cannot read .*rows\.py; dataset scripts are not supported"
    ):
        load(tmp_path / "rows.py")


def bad_rows(rows):
    def read(numbered):
        return Chunk([row for _, row in numbered])

    return [f"{number}: {reason}" for number, reason in read_rows(rows, read, 1).bad]


def test_lines_that_are_no_rows_are_bad_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        b'{"input": "a"}',
        b'{"input": }',
        b"[1]",
        b'{"input": "\xff"}',
        b"[" * 100_000,
        b"null",
    ]
    path.write_bytes(b"\n".join(lines))
    assert bad_rows(load(path)) == [
        "1: not JSON: Expecting value at column 11",
        "2: not a JSON object",
        "3: text that is not UTF-8",
        "4: values that are nested too deeply",
        "5: not a JSON object",
    ]


def test_tokenizer_without_padding_pads_with_end_of_text(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), LoadFlags())
    assert loaded.pad_token_id == loaded.eos_token_id == EOS


def test_tokenizer_errors_name_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="no such model directory"):
        load_tokenizer(str(tmp_path / "none"), LoadFlags())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path / "empty"), LoadFlags())
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless"), LoadFlags())
    with pytest.raises(UserError, match=r"--apply_chat_template: .* has no chat template"):
        require_chat_template(tiny_tokenizer())


def test_leading_ids_are_what_the_tokenizer_puts_first():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    assert leading_ids(tokenizer) == []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    assert leading_ids(tokenizer) == [BOS]
