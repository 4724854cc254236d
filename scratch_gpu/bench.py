import sys, importlib.util, torch
sys.path[:0]=['benchmarks/compress','benchmarks','src']
import arms
from gradsync.kernels.blocks import Mode
from gradsync.kernels import block_topk_triton as new
spec=importlib.util.spec_from_file_location('old','scratch_gpu/topk_old.py'); old=importlib.util.module_from_spec(spec); spec.loader.exec_module(old)
b=arms.make_buffers(106,'cuda'); code=arms.CODES['top-k']; table=arms.make_table(code,b.flat.numel(),'cuda')
pay=torch.zeros(2,table.nbytes,dtype=torch.uint8,device='cuda')
def go(mod,nreg,epw,i=0):
    mod._ELEMENTS_PER_WARP=epw; mod.ENCODING={**mod.ENCODING,'maxnreg':nreg} if nreg else {'enable_fp_fusion':False}
    mod.encode(code.block,b.flat,b.residual,table,pay[i],Mode.FEEDBACK)
acts={'copy':lambda:b.out.copy_(b.flat)}
for name,mod in (('old',old),('new',new)):
    for nreg in ((128,) if mod is old else (0,64,80,96,128)):
        for epw in ((1024,) if mod is old else (1024,512)):
            acts[f'{name} r{nreg} e{epw}']=lambda mod=mod,nreg=nreg,epw=epw:go(mod,nreg,epw)
# same bits
r0=torch.randn_like(b.residual); b.residual.copy_(r0); go(old,128,1024,0); ro=b.residual.clone(); b.residual.copy_(r0); go(new,128,1024,1)
print('same payload',bool((pay[0]==pay[1]).all()),'same residual',bool((ro==b.residual).all()))
del ro
ts={k:[] for k in acts}
for r in range(12):
    for k,f in acts.items():
        b.residual.copy_(r0)
        e0,e1=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2000000); e0.record(); f(); e1.record(); e1.synchronize()
        if r>=2: ts[k].append(e0.elapsed_time(e1))
from statistics import median
n=b.flat.numel(); bw=8*n/median(ts['copy'])
for k,v in ts.items():
    by=8*n if k=='copy' else 12*n+table.nbytes
    print(f'{k:20s} {median(v):.3f} ms  {100*by/median(v)/bw:.1f} %')
