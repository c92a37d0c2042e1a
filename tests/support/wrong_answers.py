"""Typical wrong answers to each exercise: a piece of the solution, and what stands there instead.

All of them must be refused, whatever numbers the check draws (tests/test_exercises.py).
"""

OTHER_CHUNK = "own, coming = (rank - step + 1) % size, (rank - step) % size"
SENDS_ALL = """\
    total = torch.cat(chunks)
    passed = total
    for _ in range(size - 1):
        passed = shift(passed)
        total = total + passed
    chunks[:] = total.chunk(size)
    for step in range(0):
        own"""
UPSIDE_DOWN = "upside down|not that of the image|gradient of rows"  # with one row they look alike
UNSORTED_BIAS = """\
    if weight.dim() == 1:
        return weight
    return weight.unflatten"""
TRANSPOSED = """width // p, p)
    return x.permute(0, 4, 2, 1, 3, 5)"""
VERY_WIDE = '"very wide": "--tensor_parallel=4 --data_parallel=zero2 --sequence_parallel"'
# (name, a piece of the solution, what stands there instead, what the check says to it)
WRONG = [
    ("13_steps_without_activations", "own + later", "own", "comes back from the step after"),
    ("13_steps_without_activations", "/ count", "", "the loss is .*, should be"),
    ("13_steps_without_activations", "with torch.no_grad():", "if True:", "is a step's graph gone before"),
    ("17_fair_crps", "2 * count * (count - 1)", "2 * count * count", "divide by M .M - 1., not by M M"),
    ("17_fair_crps", "/ (2 * count * (count - 1))", "/ (count * (count - 1))", "each pair counts twice"),
    ("17_fair_crps", "return error -", "return error +", "must be taken off"),
    ("17_fair_crps", "(members - truth).abs().mean(0)", "(members.mean(0) - truth).abs()", "take it term by term"),
    ("17_fair_crps", "range(1 - count, count, 2)", "range(count - 1, -count, -2)", "the sign is turned round"),
    ("17_fair_crps", "range(1 - count, count, 2)", "range(count)", "added k times, and taken off M - 1 - k times"),
    ("17_fair_crps", "return members.mean(0)", "return members.median(0).values", "smallest absolute error"),
    ("01_prefetch", "range(min(depth, count))", "range(count)", "depth is 1: the memory for them"),
    ("01_prefetch", "coming.pop(0)", "coming.pop()", "batches must come in order"),
    ("01_prefetch", "coming.pop(0).result()", "(coming.pop(0).exception(), read(i))[1]", "in the caller's thread"),
    ("02_ring_all_reduce", "chunks[coming] + shift", "shift", "chunk .* is not the sum of all ranks'"),
    ("02_ring_all_reduce", "own, coming = (rank - step)", "own, coming = rank", "added to the chunk that is sent next"),
    ("02_ring_all_reduce", "own, coming = (rank - step) % size, (rank - step - 1) % size", OTHER_CHUNK, "send first"),
    (
        "02_ring_all_reduce",
        "chunks[coming] = shift(chunks[whole])",
        "chunks[coming] += shift(chunks[whole])",
        "nothing is added",
    ),
    (
        "02_ring_all_reduce",
        "(rank + 1 - step) % size, (rank - step)",
        "(rank - step) % size, (rank - step - 1)",
        "begins",
    ),
    (
        "02_ring_all_reduce",
        "    for step in range(size - 1):\n        own",
        SENDS_ALL,
        "one chunk passed on in a step, or all",
    ),
    (
        "02_ring_all_reduce",
        "shift(chunks[own])\n",
        "shift(chunks[own])\n    chunks[:] = [c / size for c in chunks]\n",
        "mean",
    ),
    (
        "03_gradient_buckets",
        "get_world_size()",
        "get_world_size() ** 2",
        "half of what it should be: was the mean taken twice",
    ),
    ("03_gradient_buckets", "reversed(parameters)", "parameters", "last"),
    ("03_gradient_buckets", "grad.copy_(part.view_as(grad))", "part.view_as(grad)", "was the bucket copied back"),
    ("03_gradient_buckets", "buckets[-1] and size + p.grad.nbytes > limit", "buckets[-1]", "one per parameter"),
    ("04_sharded_sampler", "order[rank::size]", "order[rank::size][: length // size]", "was the rest forgotten"),
    ("04_sharded_sampler", "[rank::size][done:]", "[done:][rank::size]", "leave out the first samples of the rank"),
    ("04_sharded_sampler", "torch.Generator()", "torch.default_generator", "default generator is not as it was"),
    ("04_sharded_sampler", " + epoch", "", "the next epoch has the same order"),
    ("05_zero1", "dist.broadcast(p, owner)", "pass", "did its owner, rank ., send it"),
    ("05_zero1", "held[owner] += p.numel()", "held[owner] += 1", "least so far|by the rule"),
    ("06_tensor_parallel_mlp", "return summed(grad)", "return grad", "gradient of x .* f adds up"),
    ("06_tensor_parallel_mlp", "F.linear(h, w2)) + b2", "F.linear(h, w2, b2))", "b2 was added 2 times"),
    (
        "06_tensor_parallel_mlp",
        "        return grad\n",
        "        return summed(grad)\n",
        "2 times what it should be: g has added",
    ),
    (
        "07_merge_attention",
        "total.masked_fill(total == -torch.inf, 0)",
        "total",
        "in any block .* -inf - .-inf. is nan",
    ),
    (
        "07_merge_attention",
        "(lse - top).exp(), (block_lse - top).exp()",
        "lse.exp() / total.exp(), block_lse.exp() / total.exp()",
        "in the hundreds .* off the larger lse first",
    ),
    ("08_halo_exchange", "return own, None", "return grad[:, r:-r], None", "the halo's gradient was dropped"),
    ("08_halo_exchange", "own[:, -r:] += below", "own[:, -r:] = below", "to be added to what is there"),
    ("08_halo_exchange", "(x[:, :r], x[:, -r:])", "(x[:, -r:], x[:, :r])", "which rows does the neighbour need"),
    ("09_rule_for_shard_tensor", "(~part.isnan()).sum()", "torch.tensor(part.numel())", "the gaps were counted"),
    (
        "09_rule_for_shard_tensor",
        "reduce_from_region(torch.stack((part.nansum(), count)), everyone)",
        "reduce_from_region(part.nansum(), everyone), reduce_from_region(count, everyone)",
        "2 messages: sum and count fit into one",
    ),
    (
        "10_read_a_trace",
        "return alone + max(0, end - reached)",
        "return end - start - sum(max(0, min(e, end) - max(b, start)) for _, b, e in compute)",
        "the time counts once",
    ),
    ("10_read_a_trace", "return 1 - alone", "return alone", "that is the exposed share"),
    ("10_read_a_trace", "+ exposed(start, end, compute)", "+ end - start", "part of it is hidden"),
    ("11_reshard", "fromkeys(columns, 1)", "fromkeys(columns, 0)", "proj.weight of rank 0: .* split along dim 1"),
    ("11_reshard", "(heads, 3, -1)", "(3, heads, -1)", "this is the way back"),
    ("14_patches", "(0, 2, 4, 1, 3, 5)", "(0, 2, 4, 3, 5, 1)", "in another order: channels first"),
    ("14_patches", "(0, 3, 1, 4, 2, 5)", "(0, 3, 1, 4, 5, 2)", "the image has the shape|is not the image"),
    ("14_patches", "(3 + 1 + 4 + 4)", "(3 + 4 + 4)", "weights in its four matrices"),
    ("15_collectives", "return [before[0] for", "return [before[1] for", "every rank has what rank 0 had"),
    ("15_collectives", "[r * n : (r + 1) * n]] for r", "[:n]] for r", "rank r has piece r of every rank's list"),
    ("15_collectives", "2 * share if", "share if", "in all_reduce of .* sends"),
    ("16_broken_runs", "[0],", "[0, 1],", "^domain, ranks: rank 1 is equal in the row where the difference begins$"),
    ("16_broken_runs", "[0, 1],", "[1],", "^tensor, ranks: rank 0 differs too in the row where"),
    ("16_broken_runs", "mlp.fc2", "mlp", "^tensor, where: a part of blocks.1.mlp differs before it$"),
    ("16_broken_runs", '"all"', '"norm.bias"', "^data, where: it is not the only row of this stage that differs"),
    ("16_broken_runs", "learning rate", "moments", "^data, cause: then the weights after step 1 would be equal$"),
    ("16_broken_runs", '"halo"', '"norm"', "^domain, cause: then an output would differ, first that of a norm$"),
    (
        "12_choose_a_layout",
        VERY_WIDE,
        '"very wide": "--data_parallel=zero1"',
        "very wide: it needs .* which strategy shares them out",
    ),
    (
        "12_choose_a_layout",
        VERY_WIDE,
        '"very wide": "--data_parallel=fsdp --activation_checkpointing=full"',
        "computes activations twice",
    ),
    ("03_gradient_buckets", "size + p.grad.nbytes > limit", "False", "where .* is the limit"),
    (
        "03_gradient_buckets",
        "        flat /= dist.get_world_size()\n",
        "",
        "it is the sum: was it divided by the ranks",
    ),
    ("04_sharded_sampler", "order[rank::size]", "order", "come twice and 0 never: was the epoch filled up"),
    ("04_sharded_sampler", "1000 * seed + epoch", "epoch", "another seed has the same order"),
    ("04_sharded_sampler", "1000 * seed + epoch", "1000 * seed + epoch + rank", "do the ranks shuffle alike"),
    ("05_zero1", "held.index(min(held))", "len(self.owners) % size", "by the rule|least so far"),
    ("05_zero1", "dist.broadcast(p, owner)", "dist.broadcast(p, 0)", "value|broadcast of somebody else"),
    ("05_zero1", "dist.broadcast(p, owner)", "dist.all_reduce(p)", "is not that of Adam"),
    ("06_tensor_parallel_mlp", "return x.view_as(x)", "return summed(x)", "not that of the whole MLP"),
    ("06_tensor_parallel_mlp", "return summed(x)", "return x.view_as(x)", "this rank's summand: does g add up"),
    ("06_tensor_parallel_mlp", ") + b2", ")", "b2 is missing"),
    ("07_merge_attention", "total = torch.logaddexp(lse, block_lse)", "total = torch.maximum(lse, block_lse)", "not"),
    (
        "07_merge_attention",
        "block_weight[..., None], total",
        "block_weight[..., None], block_lse",
        "lse is not that of both",
    ),
    (
        "07_merge_attention",
        "(lse - top).exp(), (block_lse - top)",
        "(block_lse - top).exp(), (lse - top)",
        "the other block",
    ),
    ("07_merge_attention", "out * weight[..., None] + block_out", "out + block_out", "."),
    (
        "08_halo_exchange",
        "torch.cat((above, x, below), 1)",
        "torch.cat((below, x, above), 1)",
        "swapped|not those of the image",
    ),
    ("08_halo_exchange", "torch.cat((above, x, below), 1)", "torch.cat((above.flip(1), x, below), 1)", UPSIDE_DOWN),
    (
        "08_halo_exchange",
        "exchange(grad[:, :r], grad[:, -r:])",
        "exchange(grad[:, -r:], grad[:, :r])",
        "gradient of rows",
    ),
    ("09_rule_for_shard_tensor", "mean = total / count", "mean = total.detach() / count", "gradient|grad"),
    ("09_rule_for_shard_tensor", "mean = total / count", "mean = part.nanmean()", "this rank's part alone"),
    ("09_rule_for_shard_tensor", "part.nansum()", "part.sum()", "it is nan"),
    ("10_read_a_trace", "- kernel[1])[0]", "+ kernel[1])[0]", "the longest kernel is"),
    ("10_read_a_trace", "reached = max(reached, stop)", "reached = stop", "exposed"),
    ("10_read_a_trace", "min(begin, end) - reached", "begin - reached", "exposed"),
    ("11_reshard", "    return weight.unflatten", UNSORTED_BIAS, "is the bias sorted too|the order has not changed"),
    (
        "11_reshard",
        "zip(ranks, parts, strict=True)",
        "zip(ranks, reversed(parts), strict=True)",
        "pieces are joined as they are",
    ),
    ("11_reshard", '"fc1.weight", "fc1.bias"), ', '"fc1.weight"), ', "fc1.bias of rank 0"),
    (
        "12_choose_a_layout",
        '"few samples": "--tensor_parallel=4',
        '"few samples": "--tensor_parallel=16',
        "few samples: ",
    ),
    ("12_choose_a_layout", '"wide": "--data_parallel=zero2"', '"wide": "--tensor_parallel=8"', "\\bwide: "),
    ("13_steps_without_activations", "reversed(targets)", "targets", "."),
    (
        "13_steps_without_activations",
        "later = start.grad",
        "later = later + start.grad",
        "comes back from the step after",
    ),
    ("14_patches", "width // p, p)\n    return x.permute(0, 2, 4, 1, 3, 5)", TRANSPOSED, "patch at its place"),
    ("14_patches", "(0, 3, 1, 4, 2, 5)", "(0, 3, 4, 1, 2, 5)", "is not the image|the image has the shape"),
    ("15_collectives", "total[r * n : (r + 1) * n]", "total[r::size]", "in a row, not every .*th number"),
    (
        "15_collectives",
        "numbers[r * n : (r + 1) * n]] for r",
        "numbers[r::size]] for r",
        "in a row, not every .*th number",
    ),
    ("15_collectives", "sum(column)", "sum(column) / len(column)", "the sum, element by element"),
    (
        "15_collectives",
        "for numbers in before for number in numbers] for _",
        "for number in numbers] for numbers",
        "all lists",
    ),
    ("15_collectives", "(ranks - 1) / ranks * numbers", "numbers", "each of . ranks sends"),
    ("16_broken_runs", '"missing sum"', '"double sum"', "^tensor, cause: then an output would be twice"),
]
