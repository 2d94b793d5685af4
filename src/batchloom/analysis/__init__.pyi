from .explanation import (
    ExplainedSequence as ExplainedSequence,
    ExplainedSpan as ExplainedSpan,
    explain as explain,
)
from .inspection import Inspection as Inspection, inspect as inspect
from .path_check import check as check
from .plan_forecast import (
    Forecast as Forecast,
    SourceForecast as SourceForecast,
    forecast as forecast,
)
from .serving_steps import Showing as Showing, when as when, when_and_why as when_and_why
