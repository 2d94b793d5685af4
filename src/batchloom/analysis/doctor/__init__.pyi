from .diagnosis import Diagnosis as Diagnosis, doctor as doctor, unread as unread
from .examination import examine as examine
from .findings import LengthFacts as LengthFacts, SourceFacts as SourceFacts
from .packing_estimate import packing_facts as packing_facts
from .prepare_command import quote as quote
from .prepared_inputs import PreparedFacts as PreparedFacts
from .preview import Piece as Piece, Preview as Preview
from .sampling import Sizes as Sizes
