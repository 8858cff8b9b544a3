# The same four H100s, what is left of the time: END=seconds bash .sim/p3.sh. Carry .sim .npza.
. .sim/setup.sh
(on 0,1; study "texts icons" 2) &
(on 2; whole 2 fp8) &
(on 3; timeout 70 python3 -m pytest -q -p no:cacheprovider -m gpu tests/models tests/training -n 6 > $OUT/3.txt 2>&1; said tests; tail -3 $OUT/3.txt
timeout 150 python3 .sim/blocks.py --models ViT-L-14 --rows 256 --size 2048 --steps 3 --variants all fp8 --output $OUT/l14-fp8.json >> $OUT/3.txt 2>&1; said fp8
timeout $(left) python3 .sim/start.py --model ViT-B-32 --size 8192 --steps 4 >> $OUT/3.txt 2>&1; said start
timeout $(left) python3 benchmarks/single_gpu.py --only 16 --only 17 --only 18 --only 19 --only 20 --only 21 --output $OUT/single-gpu-rest.json >> $OUT/3.txt 2>&1; said peers) &
wait; cp /tmp/bs.json $OUT/; last 0 2 3
