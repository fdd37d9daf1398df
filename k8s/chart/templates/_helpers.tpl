{{- define "manta.name" -}}
{{- .Values.name | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "manta.image" -}}
{{- $i := .Values.image -}}
{{- if $i.digest -}}{{ $i.repository }}@{{ $i.digest }}{{- else -}}{{ $i.repository }}:{{ $i.tag }}{{- end -}}
{{- end }}

{{- define "manta.partOf" -}}
app.kubernetes.io/part-of: {{ include "manta.name" . }}
{{- end }}

{{- /* labels of one kind of pods: (list $ component) */}}
{{- define "manta.labels" -}}
{{ include "manta.partOf" (first .) }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- /* selects head and workers of Ray */}}
{{- define "manta.rayPods" -}}
matchLabels:
  {{- include "manta.partOf" . | nindent 2 }}
matchExpressions: [{key: ray.io/node-type, operator: In, values: [head, worker]}]
{{- end }}

{{- /* requests and limits alike: (list sizes gpus) */}}
{{- define "manta.resources" -}}
{{- $sizes := first . -}}
{{- $gpus := int (last .) -}}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}:
  {{- range $name, $size := $sizes }}
  {{ $name }}: {{ $size | toString | quote }}
  {{- end }}
  {{- if $gpus }}
  nvidia.com/gpu: {{ $gpus | toString | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "manta.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# Or every start walks through all files of a volume.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "manta.raySecurity" -}}
{{ include "manta.podSecurity" . }}
# Replicas and Serve listen on ports that the system chooses; a policy names this range, the fixed ports lie outside.
sysctls:
  - {name: net.ipv4.ip_local_port_range, value: "53000 65535"}
{{- end }}

{{- define "manta.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "manta.readOnlySecurity" -}}
{{ include "manta.containerSecurity" . }}
readOnlyRootFilesystem: true
{{- end }}

{{- /* fixed, so that policies can name them */}}
{{- define "manta.rayPorts" -}}
node-manager-port: "8076"
object-manager-port: "8077"
runtime-env-agent-port: "8078"
dashboard-agent-grpc-port: "8079"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "10999"
{{- end }}

{{- define "manta.rayEnv" -}}
- {name: RAY_health_check_initial_delay_ms, value: "0"}
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "1000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: "120"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "120"}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /opt/manta/cluster/ray-up/haproxy.sh}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Routers' own ports, few enough to name in a policy.
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT, value: "30000"}
- {name: RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT, value: "30007"}
# Left alone Ray keeps gigabytes of each log, and /tmp/ray is bounded here.
- {name: RAY_ROTATION_MAX_BYTES, value: "67108864"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "2"}
{{- end }}

{{- define "manta.secretEnv" -}}
- name: MANTA_SECRET
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.keys }}, key: MANTA_SECRET}}
{{- end }}

{{- define "manta.workerEnv" -}}
{{ include "manta.rayEnv" . }}
# The model lies on the volume; nothing is fetched at start, and no policy lets it be.
- {name: HF_HUB_CACHE, value: /models/hub}
- {name: HF_HUB_OFFLINE, value: "1"}
{{ include "manta.secretEnv" . }}
{{- end }}

{{- define "manta.aliveProbes" -}}
startupProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end }}

{{- define "manta.stayingAnnotations" -}}
# Cluster autoscaler and Karpenter are not to move these pods for tidiness.
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
karpenter.sh/do-not-disrupt: "true"
{{- end }}

{{- /* counted within one RayCluster, during an upgrade there are two: (list $ component topologyKey whenUnsatisfiable) */}}
{{- define "manta.spread" -}}
- maxSkew: 1
  topologyKey: {{ index . 2 }}
  whenUnsatisfiable: {{ index . 3 }}
  labelSelector:
    matchLabels:
      {{- include "manta.labels" (list (index . 0) (index . 1)) | nindent 6 }}
  matchLabelKeys: [ray.io/cluster]
{{- end }}

{{- define "manta.waitForModel" -}}
- name: wait-for-model
  image: {{ include "manta.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [bash, -c]
  args: ['until grep -qsxF "$MODEL" /models/READY; do echo "waiting for $MODEL"; sleep 5; done']
  env:
    - {name: MODEL, value: {{ printf "%s@%s" .Values.model.id .Values.model.revision | quote }}}
  resources:
    {{- include "manta.resources" (list (dict "cpu" "200m" "memory" "256Mi" "ephemeral-storage" "64Mi") 0) | nindent 4 }}
  securityContext:
    {{- include "manta.readOnlySecurity" . | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
{{- end }}

{{- /* of all Ray pods: (list shm logs homeCache) */}}
{{- define "manta.rayVolumes" -}}
# Memory: counts in the container's limit.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ index . 0 }}}
- name: ray-logs
  emptyDir: {sizeLimit: {{ index . 1 }}}
- name: home-cache
  emptyDir: {sizeLimit: {{ index . 2 }}}
{{- end }}

{{- define "manta.rayMounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: ray-logs, mountPath: /tmp/ray}
- {name: home-cache, mountPath: /home/manta/.cache}
{{- end }}

{{- /* the whole of what Serve deploys, from the mappings of the values */}}
{{- define "manta.serveConfig" -}}
{{- $given := .Values.serveConfig -}}
{{- $deployments := list -}}
{{- range $name, $options := $given.deployments -}}
{{- if $options -}}
{{- $deployments = append $deployments (merge (dict "name" $name) $options) -}}
{{- end -}}
{{- end -}}
{{- $application := merge (dict "deployments" $deployments) (deepCopy $given.application) -}}
{{- /* The application is built before there are workers; KubeRay does not try again if that fails. Helm drops a null. */}}
{{- $_ := set $application.args.placement "nodes_timeout_s" nil -}}
{{- toYaml (dict "proxy_location" $given.proxy_location "http_options" $given.http_options "applications" (list $application)) -}}
{{- end }}

{{- define "manta.insidePorts" -}}
# Raylet, object manager, agent.
- {port: 8076, protocol: TCP}
- {port: 8077, protocol: TCP}
- {port: 8079, protocol: TCP}
- {port: 52365, protocol: TCP}
# Ray's workers, so every actor and replica.
- {port: 10002, endPort: 10999, protocol: TCP}
# Caches: any free one of these. Within it, 30000 to 30007, the routers, for the HAProxies of other pods.
- {port: 20000, endPort: 31999, protocol: TCP}
# What the system chooses: replicas' HTTP servers, Serve's own gRPC.
- {port: 53000, endPort: 65535, protocol: TCP}
{{- end }}

{{- /* (list $ roles) */}}
{{- define "manta.nixlPods" -}}
matchLabels:
  {{- include "manta.partOf" (first .) | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: {{ last . | toJson }}
{{- end }}
