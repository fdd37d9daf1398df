"""A trace played against a modelled cluster, in simulated time: how well, how fast and how large would it have to be.

The router's part is the router's own code: its policies, prefix index, calibration and what it knows of reservations.
Modelled are the engines (`engine`, `engine_times`), their KV blocks (`block_pool`) and the stores of the nodes
(`node_stores`), whose order of eviction and admission are the store's own. `workload` and `generators` say what is
asked, `simulator` turns time, `records` keeps what became of every request, `summary` makes figures of it, and
`tables`, `page` and `sweep` show them. Nothing here loads ray, vllm or torch.
"""
