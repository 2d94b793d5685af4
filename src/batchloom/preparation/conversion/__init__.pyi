from .conversion_run import ConversionResult as ConversionResult
from .row_conversion import convert as convert
from .row_mapping import coerce_row as coerce_row
