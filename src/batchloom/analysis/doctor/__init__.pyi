from .diagnosis import doctor as doctor, estimate_packing as estimate_packing, quote_for_shell as quote_for_shell
from .examination import examine_inputs as examine_inputs
from .findings import (
    Diagnosis as Diagnosis,
    LengthFacts as LengthFacts,
    PreparedFacts as PreparedFacts,
    SourceFacts as SourceFacts,
)
from .path_check import check as check, detect_prepared_kind as detect_prepared_kind
from .sampling import DocumentPreview as DocumentPreview, PreviewSegment as PreviewSegment, SampleSizes as SampleSizes
