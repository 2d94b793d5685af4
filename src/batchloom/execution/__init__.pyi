from .answers import Failed as Failed, error_of as error_of, failure as failure
from .here import Here as Here
from .machine import cores as cores, free_memory as free_memory, workers_for as workers_for
from .pool import Pool as Pool, Ready as Ready
from .ray_cluster import RayCluster as RayCluster, RayCrew as RayCrew
from .retry import carry_out as carry_out
from .seam import Done as Done, Lost as Lost, Told as Told
