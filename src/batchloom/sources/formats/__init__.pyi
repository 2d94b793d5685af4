from .csv_format import read_csv as read_csv
from .delimiters import make_delimiter as make_delimiter
from .json_list_format import read_json as read_json
from .jsonl_format import read_jsonl as read_jsonl
from .ordered_cuts import KnownCut as KnownCut, SequentialCuts as SequentialCuts
from .record_faults import SNIPPET_BYTES as SNIPPET_BYTES, excerpt_record as excerpt_record
from .table_format import TableReader as TableReader
from .table_probe import require_no_crash as require_no_crash
from .text_cuts import find_best_cut as find_best_cut, find_character_start as find_character_start
from .text_format import (
    read_cut as read_cut,
    read_delimited as read_delimited,
    read_text_file as read_text_file,
)
from .webdataset_format import (
    find_unread_suffixes as find_unread_suffixes,
    read_samples as read_samples,
)
