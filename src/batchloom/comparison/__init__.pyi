from .frameworks import FRAMEWORKS as FRAMEWORKS
from .launch import read_record as read_record, run_example as run_example
from .runs import read_run as read_run
from .verdict import judge as judge
from .witness import Witness as Witness, expected as expected
