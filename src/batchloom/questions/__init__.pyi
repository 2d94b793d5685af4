from .dealing import dealt as dealt, in_batches as in_batches
from .explain import explain as explain
from .forecast import forecast as forecast
from .unserved import why_unserved as why_unserved
from .when import when as when
