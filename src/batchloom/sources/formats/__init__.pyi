from .ordered_cuts import KnownCut as KnownCut, SequentialCuts as SequentialCuts
from .record_faults import SNIPPET_BYTES as SNIPPET_BYTES, excerpt_record as excerpt_record
