from .detection import RecordShape as RecordShape
from .record_keys import (
    TURN_ROLES as TURN_ROLES,
    list_template_arguments as list_template_arguments,
    unused_message_keys as unused_message_keys,
)
from .record_parser import (
    Document as Document,
    ParsedRecord as ParsedRecord,
    RecordReader as RecordReader,
    TokenRow as TokenRow,
    parse_messages as parse_messages,
)
from .schemas import (
    Schema as Schema,
    find_mapping_problems as find_mapping_problems,
    format_columns as format_columns,
    get_column_value as get_column_value,
    is_column_path as is_column_path,
    is_non_empty as is_non_empty,
    match_mapping_columns as match_mapping_columns,
)
