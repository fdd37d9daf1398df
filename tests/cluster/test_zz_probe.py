import json, uuid
from tests.cluster.test_api_surface import cluster, model, both, CHAT
import tests.cluster.test_api_surface as m
pytestmark = m.pytestmark
def test_probe(cluster):
    for text in ("1.59: Ä 😀 日本語 \u200b e\u0301", "1.60 Ä", "plain"):
        for extra in ({}, {"echo": True}, {"add_generation_prompt": True, "continue_final_message": False}):
            body={"model":"tiny","messages":[{"role":"user","content":text}],"add_generation_prompt":False,"continue_final_message":True,"return_token_ids":True,"max_tokens":6,"temperature":0, "cache_salt": uuid.uuid4().hex}|extra
            for x in both(cluster, CHAT, json.dumps(body).encode()):
                d=json.loads(x.body)
                print(text, extra, d["prompt_token_ids"], d["choices"][0]["token_ids"])
