"""mlx-lm, forward and decode side by side, one token at a time, on random full-size models."""
import argparse, json, statistics, sys, time, types
sys.path.insert(0, "tests/gpu")
import mlx.core as mx
from random_model import build
from straightline.runtime import specialize
from straightline.runtime.kernels import report
from straightline.codegen.target import SPECS
T0 = time.time()
def log(*a): print(f"[{time.time()-T0:6.1f}]", *a, flush=True)
def primitives(out):
    import io
    s = io.StringIO(); mx.export_to_dot(s, out); t = s.getvalue()
    return t.count("shape=rectangle") or t.count("rectangle")
def clone(cs, make):
    new = make()
    for c, n in zip(cs, new):
        n.state = tuple(mx.contiguous(x) + 0 if isinstance(x, mx.array) else x for x in c.state)
    mx.eval([[x for x in c.state if isinstance(x, mx.array)] for c in new]); return new
def u(a): return a.view(mx.uint16)
p = argparse.ArgumentParser(); p.add_argument("--sizes", default="e4b,26b,12b"); p.add_argument("--steps", type=int, default=64); p.add_argument("--rounds", type=int, default=8); p.add_argument("--n", type=int, default=40); p.add_argument("--json")
a = p.parse_args(); record = {}
for size in a.sizes.split(","):
    config = json.loads((SPECS / f"gemma4_{size}.config.json").read_text())
    model, oracle = build(config, mx.bfloat16)
    ctx = 600 if size.startswith("e") else 1100
    t = time.time(); fast = specialize(model, strict=True); t_spec = time.time() - t
    log("==", size, "specialize %.1f s" % t_spec)
    for site, (state, why) in report().items(): log("   ", state, "|", why[:110], "|", site)
    ids = mx.array([[(7919 * i) % 250000 for i in range(ctx)]])
    base = oracle.make_cache(); mx.eval(oracle(ids, cache=base), [c.state[:2] for c in base])
    route = fast._bound.routes[0]; w = fast._bound.weights
    from straightline.runtime.taps import no_tap
    sides = {}
    c0, c1, c2 = (clone(base, oracle.make_cache) for _ in range(3))
    sides["mlx-lm"] = lambda t, c=c0: oracle(t, cache=c)
    sides["forward"] = lambda t, c=c1: route.forward(w, t, c, no_tap)
    sides["decode"] = lambda t, c=c2: fast(t, cache=c)
    t = mx.array([[23]]); bad = {k: 0 for k in sides}; prims = {}
    first = time.time(); mx.eval(sides["decode"](t)); log("   first decode %.2f s" % (time.time() - first))
    mx.eval(sides["mlx-lm"](t), sides["forward"](t))
    for step in range(a.steps):
        outs = {k: f(t) for k, f in sides.items()}
        if step == a.steps - 1: prims = {k: primitives(v) for k, v in outs.items()}
        mx.eval(list(outs.values()))
        for k, v in outs.items(): bad[k] += int((u(v) != u(outs["mlx-lm"])).sum().item() > 0)
        t = mx.argmax(outs["mlx-lm"][:, -1, :], axis=-1)[:, None]
    log("   unequal steps of", a.steps, bad, "primitives", prims, "caches", all(bool(mx.array_equal(u(x.state[0]), u(y.state[0])).item()) for x, y in zip(c0, c2)))
    def loop(f, n):
        y = mx.argmax(f(t)[:, -1, :], axis=-1)[:, None]; mx.async_eval(y)
        s = time.perf_counter()
        for _ in range(n):
            z = mx.argmax(f(y)[:, -1, :], axis=-1)[:, None]; mx.async_eval(z); y.item(); y = z
        return n / (time.perf_counter() - s)
    res = {k: [] for k in sides}
    for k, f in sides.items(): loop(f, 10)
    for r in range(a.rounds):
        for k, f in sides.items(): res[k].append(loop(f, a.n))
    for k, f in sides.items():
        B, D, W = [], [], []
        for _ in range(15):
            x0 = time.perf_counter(); y = f(t); x1 = time.perf_counter(); mx.async_eval(y); x2 = time.perf_counter(); mx.synchronize(); x3 = time.perf_counter()
            B.append(x1 - x0); D.append(x2 - x1); W.append(x3 - x2)
        med = statistics.median
        ratio = med([x / y for x, y in zip(res[k], res["mlx-lm"])])
        log("   %-8s tok/s med %6.1f max %6.1f ratio x%.2f best/best x%.2f build %.2f dispatch %.2f wait %.2f ms" % (k, med(res[k]), max(res[k]), ratio, max(res[k]) / max(res["mlx-lm"]), med(B) * 1e3, med(D) * 1e3, med(W) * 1e3))
        record[f"{size} {k}"] = dict(tokps=res[k], prims=prims.get(k), build=med(B), dispatch=med(D), wait=med(W))
    del model, oracle, fast, sides, route, w, base, c0, c1, c2; mx.clear_cache()
if a.json: json.dump(record, open(a.json, "w"))
