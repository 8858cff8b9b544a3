# The loss and its peers. One H200, 400 s. Wheels of nvidia-cutlass-dsl for liger-cute.
. experiments/next/setup.sh; export PYTHONUNBUFFERED=1
timeout 90 python3 benchmarks/single_gpu.py --only 0 --only 1 --only 2 --only 5 --only 8 --contenders megabatch --budget-seconds 80 --output $OUT/single-gpu-core.json 2>&1 | tail -6
timeout 330 python3 benchmarks/single_gpu.py --budget-seconds 320 --output $OUT/single-gpu.json > $OUT/sg.txt 2>&1; tail -60 $OUT/sg.txt
