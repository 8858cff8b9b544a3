"""What PyTorch's allocator for the CPU really gave out, as its profiler notes it."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run):
    """Most bytes at one time that `run` had from the allocator beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
