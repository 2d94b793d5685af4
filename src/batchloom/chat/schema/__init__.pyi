from .column_mapping import as_found as as_found, mapping_problems as mapping_problems
from .detection import Shape as Shape
from .prompt_answer import parse_messages as parse_messages
from .record_columns import listed as listed, says_something as says_something, value_at as value_at
from .record_keys import unused_message_keys as unused_message_keys
from .record_parser import Read as Read, Record as Record
from .schemas import Schema as Schema
from .token_rows import TokenRow as TokenRow
