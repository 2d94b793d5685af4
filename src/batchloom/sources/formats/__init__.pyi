from .format_registry import (
    COLUMNAR_KINDS as COLUMNAR_KINDS,
    FORMATS as FORMATS,
    INPUT_FORMATS as INPUT_FORMATS,
    JSON_OBJECT as JSON_OBJECT,
    SPLIT_WORDS as SPLIT_WORDS,
    WHOLE_KINDS as WHOLE_KINDS,
    InputFormat as InputFormat,
    choose_read_method as choose_read_method,
    is_splittable as is_splittable,
)
from .json_list_format import scan_brackets as scan_brackets
from .record_faults import SNIPPET_BYTES as SNIPPET_BYTES, excerpt_record as excerpt_record
