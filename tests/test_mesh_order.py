"""The mesh of hsdp, groups that hold copies x ranks of a group, whatever the order of the dimensions of all ranks."""

import sys

import numpy as np
import pytest

from distributed.weight_shards import _ranks
from tests.support.layout_parity import check_in_double
from tools.planner.fake import fake_rank
from utils import comm
from utils.layout import ORDER, Layout

# dp last, in the middle, first.
ORDERS = [ORDER, "tp-dp-domain", "dp-pp-domain-cp-tp"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("domain", [(2, 2), (4, 1), (1, 1)])
def test_the_mesh_of_hsdp_has_the_groups_of_a_layout(order, domain):
    layout = Layout(64, tp=2, shard=2, order=order, domain=domain)
    groups_of_copies = {tuple(group) for group in layout.groups("dp_replicate")}
    hook = sys.excepthook
    for rank in range(0, 64, 7):
        with fake_rank(layout, rank):
            mesh = comm.get_mesh("hsdp").mesh.numpy()
            grad_reduce = comm.get_mesh("grad_reduce").mesh.numpy()
            of_tp = comm.get_rank("tp")
            groups_by_tp = _ranks(2).reshape(2, *mesh.shape).numpy()
            ranks_by_tp = _ranks(1).numpy()
        assert rank in mesh and mesh.shape[1] == 2 * domain[0] * domain[1]
        assert {tuple(column) for column in mesh.T} <= groups_of_copies
        assert sys.excepthook is hook  # else each group that was pretended writes its rank before a traceback's lines
        # What a checkpoint takes for the parts of a weight.
        np.testing.assert_array_equal(groups_by_tp[of_tp], mesh)
        np.testing.assert_array_equal(ranks_by_tp[of_tp], grad_reduce)


@pytest.mark.slow("four ranks")
def test_hsdp_with_dp_inside_domain_is_one_device(ranks, tiny_config):
    check_in_double(ranks, tiny_config, "domain2xdp2,data_parallel=hsdp,dp_shard=1,parallel_order=dp-domain", {})
