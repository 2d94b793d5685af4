from .row_conversion import ConversionResult as ConversionResult, coerce_row as coerce_row
