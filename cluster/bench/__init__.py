"""The serving benchmark: load of a known shape against any OpenAI endpoint, measured as `vllm bench serve` does.

From the plan to the page: `config` says what is asked; `workloads` and `trace` turn it into sessions of prompts
and `arrivals` into their times; `prompts` writes a prompt down as text or token ids; `runner` sends them through
`client`; `metrics` holds the definitions and `result` what a run leaves behind; `tables` and `page` show it. Only
`client`, `lengths`, `runner` and `serve` know of the network.
"""
