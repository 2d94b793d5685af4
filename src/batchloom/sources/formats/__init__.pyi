from .csv_format import read_csv as read_csv
from .delimiters import delimiter_of as delimiter_of
from .json_list_format import read_json as read_json
from .jsonl_format import read_jsonl as read_jsonl
from .ordered_cuts import Cuts as Cuts, KnownCut as KnownCut
from .record_faults import SNIPPET_BYTES as SNIPPET_BYTES, snippet as snippet
from .table_format import Table as Table
from .table_probe import require_no_crash as require_no_crash
from .text_cuts import character_at as character_at, cut_within as cut_within
from .text_format import (
    read_cut as read_cut,
    read_delimited as read_delimited,
    read_whole as read_whole,
)
from .webdataset_format import read_samples as read_samples, sample_parts as sample_parts
