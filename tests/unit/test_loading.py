import json

import pytest
from datasets import Dataset, DatasetDict

from openrl.data.loading import load_rows
from openrl.data.tokenizer import leading_ids, load_tokenizer, require_chat_template
from openrl.errors import UserError
from tests.tiny import BOS, EOS, tiny_tokenizer

ROWS = [{"input": "1 2 -> 3:", "label": 3}, {"input": "2 2 -> 4:", "label": 4}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(source, split="train", max_samples=None):
    return load_rows(str(source), split, max_samples, flag="prompt_data")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    rows = Dataset.from_list(ROWS)
    write = {"json": rows.to_json, "jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}
    write[suffix](path)
    assert list(load(path)) == ROWS


def test_labels_of_different_types_are_kept_as_they_are(tmp_path):
    labels = [1, "x", {"numbers": [1, 2]}, {"target": 3}]
    path = jsonl(tmp_path / "rows.jsonl", [{"input": "a", "label": label} for label in labels])
    assert [row["label"] for row in load(path)] == labels


def test_saved_dataset_ignores_the_split_and_saved_dict_uses_it(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(tmp_path / "two")
    assert list(load(tmp_path / "one", split="test")) == ROWS
    assert list(load(tmp_path / "two", split="test")) == ROWS[:1]
    with pytest.raises(UserError, match=r"--prompt_data: .* has no split 'dev'; it has train, test"):
        load(tmp_path / "two", split="dev")


def test_directory_of_files_has_splits_by_file_name(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")  # "test" in a directory's name would be taken for the split
    jsonl(directory / "train.jsonl", ROWS)
    assert list(load(directory)) == ROWS
    with pytest.raises(UserError, match=r"--prompt_data: .*Unknown split \"dev\".*train"):
        load(directory, split="dev")


def test_max_samples_takes_the_first_rows(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert list(load(path, max_samples=1)) == ROWS[:1]
    assert list(load(path, max_samples=100)) == ROWS


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "./rows", "missing.parquet", "a/b/c"])
def test_missing_paths_are_named_without_asking_the_hub(source):
    with pytest.raises(UserError, match=f"--prompt_data: there is no file or directory {source}"):
        load(source)


def test_empty_and_unknown_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.txt").write_text("text")
    (tmp_path / "header.csv").write_text("input,label\n")
    (tmp_path / "list.json").write_text("[]")
    expected = {"empty.jsonl": "is empty", "rows.txt": "cannot read", "header.csv": "no rows", "list.json": "no rows"}
    for name, message in expected.items():
        with pytest.raises(UserError, match=f"--prompt_data: .*{message}"):
            load(tmp_path / name)


def test_malformed_jsonl_names_the_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a"}\n{"input": }\n{"input": "b"}\n{"input"\n')
    with pytest.raises(UserError, match=r"rows.jsonl: line 2: .*; line 4: "):
        load(path)


def test_tokenizer_without_padding_pads_with_end_of_text(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == EOS


def test_tokenizer_errors_name_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="there is no model directory"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless"))
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
